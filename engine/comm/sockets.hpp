// Sockets: listening, calling, and whole reads and writes.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace moe::comm {

std::string system_reason(int error);

// All of it; false when the connection has ended.
bool write_bytes(int socket, const void* data, std::size_t bytes);
// Writes what the connection takes at once, in bytes.
inline constexpr std::size_t connection_ended = ~std::size_t{0};
std::size_t write_some(int socket, const void* data, std::size_t bytes);
bool wait_writable(int socket, double seconds); // returns false when the socket takes nothing until then

using Clock = std::chrono::steady_clock;

class Deadline {
public:
    explicit Deadline(double seconds)
        : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
    int milliseconds() const {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
        return static_cast<int>(left > 0 ? left : 0);
    }
    bool over() const { return Clock::now() >= end_; }

private:
    Clock::time_point end_;
};

// Closes itself unless it is released.
class Socket {
public:
    explicit Socket(int value = -1) : value_(value) {}
    Socket(Socket&& other) noexcept : value_(other.release()) {}
    Socket& operator=(Socket&& other) noexcept;
    ~Socket();
    int get() const { return value_; }
    int release() { return std::exchange(value_, -1); }

private:
    int value_;
};

// Throws Error (failure) for a host that no name server knows. The addresses of `host`, with `port` set.
struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;
    bool loopback() const;
};
std::vector<Address> addresses_of(const std::string& host, int port);

// Listens at the address; port 0: any. Not a socket where that cannot be, with errno set.
Socket listen_at(const Address& address);
int port_of(int socket);          // that it is bound to
std::string own_host(int socket); // numeric, of this end of a connection
std::string host_of(int socket);  // numeric, of the other end; "" where it has gone
// Calls the host until somebody answers; throws Error (failure) at the deadline.
Socket call_until(const std::string& host, int port, const Deadline& deadline, int of_rank);
bool read_bytes(int socket, void* data, std::size_t bytes, const Deadline& deadline);
void tune(int socket); // small messages leave at once, and a host that has gone is noticed by the system as well

} // namespace moe::comm
