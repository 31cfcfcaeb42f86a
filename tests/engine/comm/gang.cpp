// Threads with a transport each.
#include "tests/engine/comm/gang.hpp"

#include "engine/base/cores.hpp"

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

bool has_ipv6() {
    const int socket = ::socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    if (socket >= 0) ::close(socket);
    return bound;
}

std::vector<std::string> failures(int world, comm::Transport::Limits limits,
                                  const std::function<void(comm::Transport&)>& body, const std::string& host) {
    std::vector<std::string> failed(static_cast<std::size_t>(world));
    std::vector<std::thread> ranks;
    const int port = free_port();
    for (int rank = 0; rank < world; ++rank)
        ranks.emplace_back([&, rank] {
            std::string& why = failed[static_cast<std::size_t>(rank)];
            try {
                comm::Transport transport({rank, world, host, port}, 7, limits);
                try {
                    body(transport);
                    transport.close();
                } catch (const engine::Aborted&) {
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

void on_transports(int world, const std::function<void(comm::Transport&)>& body, const std::string& host) {
    for (const std::string& why : failures(world, comm::Transport::Limits{}, body, host))
        if (!why.empty()) throw std::runtime_error(why);
}
