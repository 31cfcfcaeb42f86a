// A reader thread that sorts what comes into mailboxes, and the judgement of who can still send.
#include "engine/comm/transport.hpp"

#include "engine/base/cores.hpp"
#include "planner/base/error.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace moe::comm {

namespace {

// Channels of the transport itself; those of communicators lie below.
constexpr std::uint64_t beat_channel = ~std::uint64_t{0}, abort_channel = beat_channel - 1,
                        farewell_channel = beat_channel - 2, shared_channel = beat_channel - 3;
constexpr std::size_t first_bytes = std::size_t{1} << 20; // of a message, for which there is room before they come
constexpr std::size_t kept_buffers = 64;

// A longer message has no place here.
std::uint64_t longest_message() {
    return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

} // namespace

Transport::Transport(const Launch& launch, std::uint64_t fingerprint, Limits limits)
    : rank_(launch.rank), limits_(limits) {
    Meeting meeting = meet_processes(launch, fingerprint, limits.meeting);
    run_ = meeting.run;
    listener_ = std::move(meeting.listener);
    for (const int socket : meeting.sockets) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->socket = socket;
        peers_.back()->heard = Clock::now();
    }
    if (::pipe(wake_) != 0) fail("cannot make a pipe: {}", system_reason(errno));
    reader_ = std::thread([this] { read_loop(); });
}

Transport::~Transport() {
    ending_ = true;
    const char end = 0;
    if (::write(wake_[1], &end, 1) < 0) ending_ = true; // The reader looks once a second anyway.
    reader_.join();
    for (const auto& peer : peers_)
        if (peer->socket >= 0) ::close(peer->socket);
    for (const int end_of_pipe : wake_) ::close(end_of_pipe);
}

// Whoever lives reads at all times; a peer that takes nothing has stopped. One whose connection has ended will be
// missed where its messages are.
bool Transport::push(int to, const void* data, std::size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    const int socket = peers_[static_cast<std::size_t>(to)]->socket;
    while (bytes > 0) {
        const std::size_t sent = write_some(socket, from, bytes);
        if (sent == connection_ended) return false;
        from += sent;
        bytes -= sent;
        if (sent > 0 || wait_writable(socket, 0.5)) continue;
        const std::lock_guard<std::mutex> held(mutex_);
        look(to);
    }
    return true;
}

void Transport::send(int to, std::uint64_t channel, const void* data, std::size_t bytes) {
    Peer& peer = *peers_[static_cast<std::size_t>(to)];
    if (to != rank_) {
        const std::lock_guard<std::mutex> held(peer.sending);
        const std::uint64_t header[2] = {channel, bytes};
        if (push(to, header, sizeof header)) push(to, data, bytes);
        return;
    }
    const auto* first = static_cast<const char*>(data);
    const std::lock_guard<std::mutex> held(mutex_);
    peer.mail[channel].emplace_back(first, first + bytes);
}

// Throws when `from` cannot send any more, or another process has given up. The lock is held.
void Transport::check(int from) {
    const Peer& peer = *peers_[static_cast<std::size_t>(from)];
    if (!aborted_.empty()) throw engine::Aborted();
    if (peer.farewell) fail("rank {} has ended its run and sends nothing any more", from);
    if (!peer.why.empty()) fail("rank {} sends {}: the connection is given up", from, peer.why);
    if (peer.closed) fail("rank {} has died: its connection is closed", from);
    if (const double silent = seconds_since(peer.heard); from != rank_ && silent > limits_.patience)
        fail("rank {} has stopped: it has been silent for {:.0f} s", from, silent);
}

// One that has said farewell has done its part of all steps.
void Transport::check_peers() {
    const std::lock_guard<std::mutex> held(mutex_);
    for (int peer = 0; peer < world(); ++peer)
        if (peer != rank_ && !peers_[static_cast<std::size_t>(peer)]->farewell) check(peer);
}

std::string Transport::gone() {
    try {
        check_peers();
    } catch (const engine::Aborted&) {
        return aborted();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

// The work of a wait twice a second: check, and show the watchdog that it does.
void Transport::look(int from) {
    looked_ = Clock::now().time_since_epoch().count();
    check(from);
}

bool Transport::waits() const {
    return Clock::now().time_since_epoch() - Clock::duration(looked_.load()) < std::chrono::milliseconds(1500);
}

std::vector<char> Transport::take(int from, std::uint64_t channel) {
    Peer& peer = *peers_[static_cast<std::size_t>(from)];
    std::unique_lock<std::mutex> held(mutex_);
    std::deque<std::vector<char>>& box = peer.mail[channel];
    if (box.empty()) {
        const Clock::time_point start = Clock::now();
        while (box.empty()) {
            look(from);
            arrived_.wait_for(held, std::chrono::milliseconds(500));
        }
        waited_ += seconds_since(start);
    }
    std::vector<char> message = std::move(box.front());
    box.pop_front();
    return message;
}

std::vector<char> Transport::receive(int from, std::uint64_t channel) { return take(from, channel); }

void Transport::receive(int from, std::uint64_t channel, std::span<char> out) {
    std::vector<char> message = take(from, channel);
    if (message.size() != out.size())
        fail("a message of rank {} has {} bytes, {} were expected", from, message.size(), out.size());
    if (!out.empty()) std::memcpy(out.data(), message.data(), out.size());
    const std::lock_guard<std::mutex> held(mutex_);
    Peer& peer = *peers_[static_cast<std::size_t>(from)];
    if (peer.empty.size() < kept_buffers) peer.empty.push_back(std::move(message));
}

void Transport::read_loop() {
    std::vector<Arrival> arrivals(peers_.size());
    std::vector<pollfd> waiting;
    std::vector<int> owner;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
        if (peers_[r]->socket < 0) continue;
        waiting.push_back({peers_[r]->socket, POLLIN, 0});
        owner.push_back(static_cast<int>(r));
    }
    waiting.push_back({wake_[0], POLLIN, 0});
    waiting.push_back({listener_.get(), POLLIN, 0}); // -1 is passed over
    std::thread beating([this] { beat(); });
    while (!ending_) {
        if (::poll(waiting.data(), waiting.size(), 1000) <= 0) continue;
        if (waiting.back().revents != 0) turn_away(listener_.get());
        for (std::size_t i = 0; i < owner.size(); ++i)
            if (waiting[i].revents != 0 && !read_some(owner[i], arrivals[static_cast<std::size_t>(owner[i])]))
                waiting[i].fd = -1; // poll() passes over a negative descriptor.
    }
    beating.join();
}

// Room for a message grows with what has come of it: a length costs nothing until its bytes are there. False where the
// machine has none.
bool Transport::make_room(Arrival& arrival) {
    const std::size_t length = arrival.header[1], come = arrival.have - sizeof arrival.header;
    if (come < arrival.data.size() || arrival.data.size() == length) return true;
    try {
        arrival.data.resize(std::min(length, std::max(first_bytes, 2 * come)));
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// Reads the bytes that lie ready on a connection; false when it has ended.
bool Transport::read_some(int from, Arrival& arrival) {
    Peer& peer = *peers_[static_cast<std::size_t>(from)];
    constexpr std::size_t header = sizeof arrival.header;
    char* to = arrival.have < header ? reinterpret_cast<char*>(arrival.header) + arrival.have
                                     : arrival.data.data() + (arrival.have - header);
    const std::size_t wanted =
        arrival.have < header ? header - arrival.have : header + arrival.data.size() - arrival.have;
    const ssize_t got = ::recv(peer.socket, to, wanted, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    arrival.have += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    const bool begins = arrival.have == header; // The whole header tells the length of the data.
    {
        const std::lock_guard<std::mutex> held(mutex_);
        peer.heard = Clock::now();
        if (got <= 0) return end_of(peer, "");
        if (begins && arrival.header[1] > longest_message())
            return end_of(peer,
                          fmt::format("a message of {} bytes, more than this machine's memory", arrival.header[1]));
        if (begins && arrival.header[1] > 0 && !peer.empty.empty()) {
            arrival.data = std::move(peer.empty.back());
            arrival.data.resize(std::min<std::size_t>(arrival.data.size(), arrival.header[1]));
            peer.empty.pop_back();
        }
    }
    if (arrival.have >= header && !make_room(arrival)) {
        const std::lock_guard<std::mutex> held(mutex_);
        return end_of(peer, fmt::format("a message of {} bytes, for which there is no memory", arrival.header[1]));
    }
    if (arrival.have >= header && arrival.have == header + arrival.header[1]) deliver(from, arrival);
    return true;
}

// The lock is held.
bool Transport::end_of(Peer& peer, std::string why) {
    peer.closed = true;
    peer.why = std::move(why);
    arrived_.notify_all();
    return false;
}

void Transport::deliver(int from, Arrival& arrival) {
    Peer& peer = *peers_[static_cast<std::size_t>(from)];
    const std::lock_guard<std::mutex> held(mutex_);
    if (arrival.header[0] == abort_channel && aborted_.empty())
        aborted_.assign(arrival.data.begin(), arrival.data.end());
    else if (arrival.header[0] == farewell_channel)
        peer.farewell = true;
    else if (arrival.header[0] != beat_channel)
        peer.mail[arrival.header[0]].push_back(std::move(arrival.data));
    arrival = Arrival{};
    arrived_.notify_all();
}

// Says once a second that this process lives. A thread of its own: it must not wait behind a peer that does not read.
void Transport::beat() {
    for (int tenths = 0; !ending_; ++tenths) {
        if (tenths % 10 == 0)
            for (const auto& peer : peers_) {
                // A message on its way shows already that this process lives.
                const std::unique_lock<std::mutex> held(peer->sending, std::try_to_lock);
                const std::uint64_t header[2] = {beat_channel, 0};
                if (held && peer->socket >= 0 && wait_writable(peer->socket, 0.0))
                    write_bytes(peer->socket, header, sizeof header);
            }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

void Transport::broadcast(int root, std::span<char> data) {
    if (rank_ != root) return receive(root, shared_channel, data);
    for (int r = 0; r < world(); ++r)
        if (r != root) send(r, shared_channel, data.data(), data.size());
}

std::vector<std::vector<char>> Transport::gather(int root, std::span<const char> data) {
    send(root, shared_channel, data.data(), data.size());
    std::vector<std::vector<char>> all;
    if (rank_ == root)
        for (int r = 0; r < world(); ++r) all.push_back(receive(r, shared_channel));
    return all;
}

bool Transport::any(bool here) {
    char mine = here ? 1 : 0;
    for (const std::vector<char>& one : gather(0, {&mine, 1})) mine = static_cast<char>(mine | one.front());
    broadcast(0, {&mine, 1});
    return mine != 0;
}

void Transport::close() {
    for (int r = 0; r < world(); ++r)
        if (r != rank_) send(r, farewell_channel, nullptr, 0);
    std::unique_lock<std::mutex> held(mutex_);
    const auto gone = [this] {
        return std::all_of(peers_.begin(), peers_.end(),
                           [](const auto& p) { return p->socket < 0 || p->farewell || p->closed; });
    };
    arrived_.wait_for(held, std::chrono::duration<double>(limits_.patience), gone);
}

void Transport::abort(const std::string& why) {
    for (const auto& peer : peers_) {
        // Held for good by a thread that hangs in the middle of a message: that peer will see the connection close.
        std::unique_lock<std::mutex> held(peer->sending, std::try_to_lock);
        for (int tries = 0; tries < 20 && !held; ++tries) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            static_cast<void>(held.try_lock()); // the loop asks `held`
        }
        if (!held || peer->socket < 0 || !wait_writable(peer->socket, 0.2)) continue;
        const std::uint64_t header[2] = {abort_channel, why.size()};
        if (write_bytes(peer->socket, header, sizeof header)) write_bytes(peer->socket, why.data(), why.size());
    }
    // A connection that is closed with something unread in it may drop what it has not sent.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

std::string Transport::aborted() {
    const std::lock_guard<std::mutex> held(mutex_);
    return aborted_;
}

} // namespace moe::comm
