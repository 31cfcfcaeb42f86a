// A listener that many may call at once, of whom only those who prove that they know the job's token are let in.
#pragma once

#include "engine/base/hmac.hpp"
#include "engine/comm/launch.hpp"
#include "engine/comm/sockets.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

namespace moe::comm {

using Nonce = std::array<std::uint8_t, 32>;
Nonce draw_nonce();

constexpr std::uint32_t greeting = 0x4d4f4551;

// What a listener sends first. A late caller finds `over` set.
struct Challenge {
    std::uint32_t magic = greeting, over = 0;
    Nonce nonce{};
};
// The caller's word, with the HMAC of both nonces and of all its fields.
struct Hello {
    std::uint32_t magic = greeting;
    std::int32_t rank = 0, world = 0, port = 0;
    std::uint64_t fingerprint = 0;
    Nonce nonce{};
    engine::Digest proof{};
};
engine::Digest proof_of(const Hello& hello, const Nonce& challenge, const std::string& token);

// Reads the challenge on a connection that this process has called and answers it; sets the hello's nonce and proof.
// False where the other side is none of ours or has gone; `over` tells that it lets nobody in any more.
bool say_hello(int socket, Hello& hello, Nonce& challenge, const std::string& token, const Deadline& deadline,
               bool& over);

class Reception {
public:
    static constexpr double patience = 5.0;          // seconds that a caller may take for its hello
    static constexpr std::size_t most_callers = 256; // callers at once; the one that has waited longest makes room
    static constexpr int most_lines = 8;             // lines about callers that were sent away

    using Admit = std::function<void(const Hello& hello, const Nonce& challenge, Socket socket)>;

    Reception(Socket listener, const Launch& launch) : listener_(std::move(listener)), launch_(launch) {}

    // Serves all callers until something has come, at most `seconds`; hands on those whose proof is right.
    void serve(double seconds, const Admit& admit);
    void say(const std::string& line);
    int port() const { return port_of(listener_.get()); }
    Socket close() { return std::move(listener_); }

private:
    struct Caller {
        Socket socket;
        std::string host;
        Nonce challenge{};
        Hello hello;
        std::size_t have = 0; // bytes of the hello
        Deadline end{patience};
    };
    void accept_caller();
    // Reads what lies ready; false when the caller is to be let go of.
    bool listen_to(Caller& caller, const Admit& admit);

    Socket listener_;
    const Launch& launch_;
    std::deque<Caller> callers_;
    int said_ = 0;
};

} // namespace moe::comm
