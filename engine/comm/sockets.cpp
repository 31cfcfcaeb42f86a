// Rendezvous over TCP: a listener at rank 0, hellos with rank and fingerprint, and a table of everybody's place.
#include "engine/comm/sockets.hpp"

#include "planner/base/error.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>
#include <string_view>
#include <system_error>
#include <thread>

namespace moe::comm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t greeting = 0x4d4f4550; // "MOEP"

struct Hello {
    std::uint32_t magic = greeting;
    std::int32_t rank = 0, world = 0, port = 0;
    std::uint64_t fingerprint = 0;
};
struct Place { // address of a rank that listens
    char host[64] = {};
    std::int32_t port = 0;
};
// The answer of rank 0: the table of places follows.
struct Answer {
    std::uint32_t magic = greeting;
    std::int32_t refused = 0; // 1: another world, 2: another fingerprint
    std::uint64_t run = 0;
};

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
    Socket& operator=(Socket&&) = delete;
    ~Socket() {
        if (value_ >= 0) ::close(value_);
    }
    int get() const { return value_; }
    int release() { return std::exchange(value_, -1); }

private:
    int value_;
};

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

// Both families keep the port at the same place in their structures, behind the family.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
void set_port(sockaddr_storage& address, int port) {
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<std::uint16_t>(port));
}
int port_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// One socket for both families; a machine without IPv6 has the older one only.
Socket listener_of(int family, int port) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1, off = 0;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = sizeof(sockaddr_in);
    if (family == AF_INET6) {
        ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        length = sizeof(sockaddr_in6);
    }
    set_port(address, port);
    const bool listens = socket.get() >= 0 &&
                         ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                         ::listen(socket.get(), 1024) == 0;
    return listens ? std::move(socket) : Socket();
}

int listen_at(int port, int& chosen) {
    for (const int family : {AF_INET6, AF_INET}) {
        Socket socket = listener_of(family, port);
        if (socket.get() < 0) continue;
        chosen = port_of(socket.get());
        return socket.release();
    }
    fail("cannot listen at port {}: {}; set MASTER_PORT to a free one", port, system_reason(errno));
}

// -1 where nobody answers yet.
int call(const std::string& host, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0)
        fail("cannot find the host {}: {}; set MASTER_ADDR to the node of rank 0", host, ::gai_strerror(error));
    int result = -1;
    for (const addrinfo* a = found; a != nullptr && result < 0; a = a->ai_next) {
        Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
        if (socket.get() >= 0 && ::connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0) result = socket.release();
    }
    ::freeaddrinfo(found);
    return result;
}

int call_until(const std::string& host, int port, const Deadline& deadline, int of_rank) {
    while (true) {
        if (const int socket = call(host, port); socket >= 0) return socket;
        if (deadline.over()) fail("rank {} does not answer at {}:{}: was it started?", of_rank, host, port);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

int accept_until(int listener, const Deadline& deadline) {
    pollfd ready{listener, POLLIN, 0};
    if (::poll(&ready, 1, deadline.milliseconds()) <= 0) return -1;
    return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
}

// The host as getaddrinfo reads it; a caller by IPv4 at a listener for both families is known by its IPv4 address.
std::string host_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length);
    char text[NI_MAXHOST] = {};
    ::getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    const std::string_view host(text), mapped("::ffff:");
    return std::string(host.starts_with(mapped) && host.find('.') != host.npos ? host.substr(mapped.size()) : host);
}

void set_place(Place& place, const std::string& host, int port) {
    std::strncpy(place.host, host.c_str(), sizeof place.host - 1);
    place.port = port;
}

// Small messages leave at once, and a host that has gone is noticed by the system as well.
void tune(int socket) {
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

std::string missing(const std::vector<int>& sockets) {
    std::string list;
    int named = 0;
    for (std::size_t r = 1; r < sockets.size(); ++r)
        if (sockets[r] < 0 && named++ < 8) list += (list.empty() ? "" : ", ") + std::to_string(r);
    return list + (named > 8 ? ", ..." : "");
}

[[noreturn]] void refuse_hello(const Hello& hello, const Launch& launch) {
    if (hello.world != launch.world)
        refuse("rank {} was started as one of {} processes, rank 0 as one of {}", hello.rank, hello.world,
               launch.world);
    refuse("rank {} runs another plan or other options than rank 0: start all with the same command", hello.rank);
}

Meeting meet_as_first(const Launch& launch, std::uint64_t fingerprint, const Deadline& deadline) {
    int port = 0;
    const Socket listener(listen_at(launch.port, port));
    Meeting meeting;
    meeting.sockets.assign(static_cast<std::size_t>(launch.world), -1);
    std::vector<Place> places(meeting.sockets.size());
    std::random_device random;
    const Answer welcome{greeting, 0, (std::uint64_t{random()} << 32) | random()};
    for (int come = 1; come < launch.world;) {
        Socket socket(accept_until(listener.get(), deadline));
        if (socket.get() < 0)
            fail("{} of {} processes have come to port {}; ranks {} have not: were they started?", come, launch.world,
                 launch.port, missing(meeting.sockets));
        Hello hello;
        // Whoever else calls at this port is sent away.
        if (!read_bytes(socket.get(), &hello, sizeof hello, Deadline(5.0)) || hello.magic != greeting) continue;
        const bool fits = hello.world == launch.world && hello.rank > 0 && hello.rank < launch.world;
        if (!fits || hello.fingerprint != fingerprint) {
            const Answer no{greeting, fits ? 2 : 1, 0};
            write_bytes(socket.get(), &no, sizeof no);
            for (const int other : meeting.sockets)
                if (other >= 0) write_bytes(other, &no, sizeof no);
            refuse_hello(hello, launch);
        }
        int& place = meeting.sockets[static_cast<std::size_t>(hello.rank)];
        if (place >= 0) fail("two processes say that they are rank {}", hello.rank);
        set_place(places[static_cast<std::size_t>(hello.rank)], host_of(socket.get()), hello.port);
        place = socket.release();
        ++come;
    }
    for (const int socket : meeting.sockets) {
        if (socket < 0) continue;
        write_bytes(socket, &welcome, sizeof welcome);
        write_bytes(socket, places.data(), places.size() * sizeof(Place));
    }
    meeting.run = fmt::format("-{:016x}", welcome.run);
    return meeting;
}

Meeting meet_as_other(const Launch& launch, std::uint64_t fingerprint, const Deadline& deadline) {
    Meeting meeting;
    meeting.sockets.assign(static_cast<std::size_t>(launch.world), -1);
    int port = 0;
    const Socket listener(listen_at(0, port));
    Socket first(call_until(launch.host, launch.port, deadline, 0));
    const Hello hello{greeting, launch.rank, launch.world, port, fingerprint};
    Answer answer;
    std::vector<Place> places(meeting.sockets.size());
    write_bytes(first.get(), &hello, sizeof hello);
    if (!read_bytes(first.get(), &answer, sizeof answer, deadline) || answer.magic != greeting)
        fail("rank 0 at {}:{} has ended before all processes had come", launch.host, launch.port);
    if (answer.refused != 0)
        refuse("rank 0 found processes of {}: start all with the same command",
               answer.refused == 1 ? "another number of processes" : "another plan or other options");
    if (!read_bytes(first.get(), places.data(), places.size() * sizeof(Place), deadline))
        fail("rank 0 at {}:{} has ended before all processes had met", launch.host, launch.port);
    meeting.run = fmt::format("-{:016x}", answer.run);
    meeting.sockets[0] = first.release();
    for (int r = 1; r < launch.rank; ++r) {
        const Place& place = places[static_cast<std::size_t>(r)];
        Socket socket(call_until(place.host, place.port, deadline, r));
        write_bytes(socket.get(), &hello, sizeof hello);
        meeting.sockets[static_cast<std::size_t>(r)] = socket.release();
    }
    for (int come = launch.rank + 1; come < launch.world;) {
        Socket socket(accept_until(listener.get(), deadline));
        if (socket.get() < 0) fail("{} of {} processes have called rank {}", come, launch.world, launch.rank);
        Hello other;
        if (!read_bytes(socket.get(), &other, sizeof other, Deadline(5.0)) || other.magic != greeting ||
            other.fingerprint != fingerprint || other.rank <= launch.rank || other.rank >= launch.world)
            continue;
        meeting.sockets[static_cast<std::size_t>(other.rank)] = socket.release();
        ++come;
    }
    return meeting;
}

} // namespace

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

Meeting meet_processes(const Launch& launch, std::uint64_t fingerprint, double patience) {
    const Deadline deadline(patience);
    Meeting meeting =
        launch.rank == 0 ? meet_as_first(launch, fingerprint, deadline) : meet_as_other(launch, fingerprint, deadline);
    for (const int socket : meeting.sockets)
        if (socket >= 0) tune(socket);
    return meeting;
}

} // namespace moe::comm
