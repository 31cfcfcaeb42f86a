// The handshake on both sides: challenge, hello, proof.
#include "engine/comm/reception.hpp"

#include "planner/base/error.hpp"

#include <poll.h>
#include <sys/random.h>

#include <cerrno>
#include <type_traits>
#include <utility>
#include <vector>

namespace moe::comm {

// Nothing between the fields goes over the wire or into the proof.
static_assert(sizeof(Challenge) == 40 && sizeof(Hello) == 88 && std::is_trivially_copyable_v<Hello>);

Nonce draw_nonce() {
    Nonce nonce{};
    if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()))
        fail("cannot draw random numbers: {}", system_reason(errno));
    return nonce;
}

engine::Digest proof_of(const Hello& hello, const Nonce& challenge, const std::string& token) {
    std::string message = "moe-plan hello";
    message.append(reinterpret_cast<const char*>(&hello), offsetof(Hello, proof));
    message.append(challenge.begin(), challenge.end());
    return engine::hmac_sha256(token, message);
}

bool say_hello(int socket, Hello& hello, Nonce& challenge, const std::string& token, const Deadline& deadline,
               bool& over) {
    Challenge first;
    if (!read_bytes(socket, &first, sizeof first, deadline) || first.magic != greeting) return false;
    over = first.over != 0;
    if (over) return false;
    challenge = first.nonce;
    hello.nonce = draw_nonce();
    hello.proof = proof_of(hello, challenge, token);
    return write_bytes(socket, &hello, sizeof hello);
}

void Reception::say(const std::string& line) {
    if (!launch_.say || said_ > most_lines) return;
    launch_.say(said_++ < most_lines ? line : "more callers were sent away, of which nothing more is said");
}

void Reception::accept_caller() {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket.get() < 0) return;
    const Challenge challenge{greeting, 0, draw_nonce()};
    // The first bytes on a connection always have room.
    if (write_some(socket.get(), &challenge, sizeof challenge) != sizeof challenge) return;
    if (callers_.size() == most_callers) callers_.pop_front();
    Caller caller;
    caller.host = host_of(socket.get());
    caller.socket = std::move(socket);
    caller.challenge = challenge.nonce;
    callers_.push_back(std::move(caller));
}

bool Reception::listen_to(Caller& caller, const Admit& admit) {
    const ssize_t got = ::recv(caller.socket.get(), reinterpret_cast<char*>(&caller.hello) + caller.have,
                               sizeof caller.hello - caller.have, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) {
        say(fmt::format("a caller from {} has gone without a hello", caller.host));
        return false;
    }
    caller.have += static_cast<std::size_t>(got);
    const bool ours = caller.have < sizeof caller.hello.magic || caller.hello.magic == greeting;
    if (ours && caller.have < sizeof caller.hello) return true;
    if (!ours)
        say(fmt::format("sent away a caller from {}: what it says is no hello", caller.host));
    else if (!engine::same_digest(caller.hello.proof, proof_of(caller.hello, caller.challenge, launch_.token)))
        say(fmt::format("sent away a caller from {}: it does not know this job's token", caller.host));
    else
        admit(caller.hello, caller.challenge, std::move(caller.socket));
    return false;
}

void Reception::serve(double seconds, const Admit& admit) {
    std::vector<pollfd> waiting{{listener_.get(), POLLIN, 0}};
    for (const Caller& caller : callers_) waiting.push_back({caller.socket.get(), POLLIN, 0});
    if (::poll(waiting.data(), waiting.size(), static_cast<int>(seconds * 1e3)) < 0) return;
    std::deque<Caller> stay;
    for (std::size_t i = 0; i < callers_.size(); ++i) {
        Caller& caller = callers_[i];
        if (waiting[i + 1].revents != 0 && !listen_to(caller, admit)) continue;
        if (caller.end.over())
            say(fmt::format("sent away a caller from {}: no hello in {:.0f} s", caller.host, patience));
        else
            stay.push_back(std::move(caller));
    }
    callers_ = std::move(stay);
    if (waiting[0].revents != 0) accept_caller();
}

} // namespace moe::comm
