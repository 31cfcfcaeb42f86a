// Threads with a transport each.
#include "tests/engine/gang.hpp"

#include "engine/cores.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>
#include <thread>

using namespace moe;

int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (::bind(socket, reinterpret_cast<sockaddr*>(&address), length) != 0) throw std::runtime_error("no free port");
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
    ::close(socket);
    return ntohs(address.sin_port);
}

std::vector<std::string> failures(int world, Transport::Limits limits, const std::function<void(Transport&)>& body) {
    std::vector<std::string> failed(static_cast<std::size_t>(world));
    std::vector<std::thread> ranks;
    const int port = free_port();
    for (int rank = 0; rank < world; ++rank)
        ranks.emplace_back([&, rank] {
            std::string& why = failed[static_cast<std::size_t>(rank)];
            try {
                Transport transport({rank, world, "127.0.0.1", port}, 7, limits);
                try {
                    body(transport);
                    transport.close();
                } catch (const Aborted&) {
                    why = transport.aborted();
                } catch (const std::exception& error) {
                    why = error.what();
                    transport.abort(why);
                }
            } catch (const std::exception& error) {
                why = error.what();
            }
        });
    for (std::thread& rank : ranks) rank.join();
    return failed;
}

void on_transports(int world, const std::function<void(Transport&)>& body) {
    for (const std::string& why : failures(world, Transport::Limits{}, body))
        if (!why.empty()) throw std::runtime_error(why);
}
