// Calls of the system's socket interface.
#include "engine/comm/sockets.hpp"

#include "planner/base/error.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <thread>

namespace moe::comm {

namespace {

// Both families keep the port at the same place in their structures, behind the family.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));

// A caller by IPv4 at a listener for both families is known by its IPv4 address.
std::string numeric(const sockaddr_storage& address, socklen_t length) {
    char text[NI_MAXHOST] = {};
    ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    const std::string_view host(text), mapped("::ffff:");
    return std::string(host.starts_with(mapped) && host.find('.') != host.npos ? host.substr(mapped.size()) : host);
}

// Not a socket where nobody answers yet.
Socket call(const std::string& host, int port) {
    for (const Address& address : addresses_of(host, port)) {
        Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
        if (socket.get() >= 0 && ::connect(socket.get(), to, address.length) == 0) return socket;
    }
    return Socket();
}

} // namespace

Socket::~Socket() {
    if (value_ >= 0) ::close(value_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
    if (this != &other) {
        if (value_ >= 0) ::close(value_);
        value_ = other.release();
    }
    return *this;
}

bool Address::loopback() const {
    if (storage.ss_family == AF_INET)
        return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
    return storage.ss_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

std::vector<Address> addresses_of(const std::string& host, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0)
        fail("cannot find the host {}: {}; set MASTER_ADDR to the node of rank 0", host, ::gai_strerror(error));
    std::vector<Address> addresses;
    for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
        Address address;
        std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
        address.length = a->ai_addrlen;
        addresses.push_back(address);
    }
    ::freeaddrinfo(found);
    return addresses;
}

Socket listen_at(const Address& address) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const auto* at = reinterpret_cast<const sockaddr*>(&address.storage);
    const bool listens =
        socket.get() >= 0 && ::bind(socket.get(), at, address.length) == 0 && ::listen(socket.get(), 1024) == 0;
    return listens ? std::move(socket) : Socket();
}

int port_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

std::string own_host(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
    return numeric(address, length);
}

std::string host_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    return ::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? numeric(address, length) : "";
}

Socket call_until(const std::string& host, int port, const Deadline& deadline, int of_rank) {
    while (true) {
        if (Socket socket = call(host, port); socket.get() >= 0) return socket;
        if (deadline.over()) fail("rank {} does not answer at {}:{}: was it started?", of_rank, host, port);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

bool read_bytes(int socket, void* data, std::size_t bytes, const Deadline& deadline) {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
        pollfd ready{socket, POLLIN, 0};
        if (::poll(&ready, 1, deadline.milliseconds()) <= 0) return false;
        const ssize_t got = ::recv(socket, to, bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        to += got;
        bytes -= static_cast<std::size_t>(got);
    }
    return true;
}

void tune(int socket) {
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

std::string system_reason(int error) { return std::generic_category().message(error); }

bool write_bytes(int socket, const void* data, std::size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t sent = ::send(socket, from, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        from += sent;
        bytes -= static_cast<std::size_t>(sent);
    }
    return true;
}

std::size_t write_some(int socket, const void* data, std::size_t bytes) {
    const ssize_t sent = ::send(socket, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    return errno == EAGAIN || errno == EINTR ? 0 : connection_ended;
}

bool wait_writable(int socket, double seconds) {
    pollfd ready{socket, POLLOUT, 0};
    return ::poll(&ready, 1, static_cast<int>(seconds * 1e3)) > 0 && (ready.revents & POLLOUT) != 0;
}

} // namespace moe::comm
