// Rendezvous over TCP: a listener at rank 0, hellos with rank and fingerprint, and a table of everybody's place.
#include "engine/comm/meeting.hpp"

#include "engine/comm/reception.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>

namespace moe::comm {

namespace {

constexpr double disagreement_patience = 5.0; // seconds that a rank which disagrees has for coming again

struct Place { // address of a rank that listens
    char host[64] = {};
    std::int32_t port = 0;
};
enum Refusal : std::int32_t { welcome = 0, other_world = 1, other_plan = 2, rank_taken = 3 };
// The answer of rank 0: the table of places follows where it is a welcome.
struct Answer {
    std::uint32_t magic = greeting;
    std::int32_t refused = welcome;
    std::uint64_t run = 0;
    engine::Digest proof{};
};
static_assert(sizeof(Answer) == 48 && sizeof(Place) == 68);

engine::Digest proof_of(const Answer& answer, const Hello& hello, const Nonce& challenge, std::span<const Place> places,
                        const std::string& token) {
    std::string message = "moe-plan answer";
    message.append(reinterpret_cast<const char*>(&answer), offsetof(Answer, proof));
    message.append(hello.nonce.begin(), hello.nonce.end());
    message.append(challenge.begin(), challenge.end());
    message.append(reinterpret_cast<const char*>(places.data()), places.size_bytes());
    return engine::hmac_sha256(token, message);
}

void require_token_or_loopback(const Launch& launch, const std::string& host, const char* option) {
    if (!launch.token.empty()) return;
    for (const Address& address : addresses_of(host, launch.port))
        if (!address.loopback())
            refuse("{} = {}: other machines can reach it, and the job has no token: set MOE_PLAN_JOB_TOKEN to the same "
                   "random word for all ranks, as the files of moe-plan launch do",
                   option, host);
}

// At the interface of --listen, else of MASTER_ADDR. A name that means this machine alone here may mean its network's
// address elsewhere (/etc/hosts): then, and where the address is that of a gateway, at all interfaces.
Socket first_listener(const Launch& launch) {
    const bool chosen = !launch.listen.empty();
    const std::string& host = chosen ? launch.listen : launch.host;
    require_token_or_loopback(launch, host, chosen ? "--listen" : "MASTER_ADDR");
    int error = 0;
    const auto try_host = [&](const std::string& at) {
        for (const Address& address : addresses_of(at, launch.port)) {
            const bool only_here = address.loopback() && at != "localhost" && at != "::1" && !at.starts_with("127.");
            if (only_here && !launch.token.empty() && !chosen) continue;
            if (Socket socket = listen_at(address); socket.get() >= 0) return socket;
            error = errno;
        }
        return Socket();
    };
    if (Socket socket = try_host(host); socket.get() >= 0) return socket;
    if (!launch.token.empty() && !chosen && (error == 0 || error == EADDRNOTAVAIL))
        for (const char* all : {"::", "0.0.0.0"})
            if (Socket socket = try_host(all); socket.get() >= 0) return socket;
    if (error == EADDRNOTAVAIL)
        fail("cannot listen at {}: {}; set {} to an address of this machine", host, system_reason(error),
             chosen ? "--listen" : "MASTER_ADDR");
    fail("cannot listen at port {} of {}: {}; set MASTER_PORT to a free one", launch.port, host, system_reason(error));
}

// True where the other end of a connection that should be silent is there.
bool lives(int socket) {
    char byte = 0;
    const ssize_t got = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got < 0 && (errno == EAGAIN || errno == EINTR);
}

// The work of rank 0.
class First {
public:
    First(const Launch& launch, std::uint64_t fingerprint, double patience)
        : launch_(launch),
          fingerprint_(fingerprint),
          deadline_(patience),
          reception_(first_listener(launch), launch),
          joined_(static_cast<std::size_t>(launch.world)) {}

    Meeting meet() {
        while (come() < launch_.world) {
            if (deadline_.over() || (!disagreement_.empty() && disagreement_end_->over())) give_up();
            reception_.serve(0.2, [this](const Hello& hello, const Nonce& challenge, Socket socket) {
                admit(hello, challenge, std::move(socket));
            });
            for (std::size_t r = 1; r < joined_.size(); ++r) {
                if (!joined_[r] || lives(joined_[r]->socket.get())) continue;
                reception_.say(fmt::format("rank {} has gone before all had come; it may come again", r));
                joined_[r].reset();
            }
        }
        return welcome_all();
    }

private:
    struct Joined {
        Socket socket;
        Hello hello;
        Nonce challenge{};
        std::string host;
    };

    int come() const {
        return 1 + static_cast<int>(
                       std::count_if(joined_.begin(), joined_.end(), [](const auto& j) { return j.has_value(); }));
    }

    void answer(const Joined& to, Answer answer, std::span<const Place> places) const {
        answer.proof = proof_of(answer, to.hello, to.challenge, places, launch_.token);
        if (write_bytes(to.socket.get(), &answer, sizeof answer))
            write_bytes(to.socket.get(), places.data(), places.size_bytes());
    }

    void admit(const Hello& hello, const Nonce& challenge, Socket socket) {
        Joined caller{std::move(socket), hello, challenge, ""};
        caller.host = host_of(caller.socket.get());
        const bool fits = hello.world == launch_.world && hello.rank > 0 && hello.rank < launch_.world;
        if (!fits || hello.fingerprint != fingerprint_) {
            disagreement_ = fits ? fmt::format("rank {} runs another plan or other options than rank 0: start all with "
                                               "the same command",
                                               hello.rank)
                                 : fmt::format("rank {} was started as one of {} processes, rank 0 as one of {}",
                                               hello.rank, hello.world, launch_.world);
            disagreeing_ = hello.rank;
            disagreement_end_.emplace(disagreement_patience);
            reception_.say(fmt::format("sent away a caller from {}: {}", caller.host, disagreement_));
            return answer(caller, {greeting, fits ? other_plan : other_world, 0, {}}, {});
        }
        std::optional<Joined>& place = joined_[static_cast<std::size_t>(hello.rank)];
        if (place && lives(place->socket.get())) {
            reception_.say(fmt::format("sent away a caller from {}: two processes say that they are rank {}",
                                       caller.host, hello.rank));
            return answer(caller, {greeting, rank_taken, 0, {}}, {});
        }
        if (disagreeing_ == hello.rank) disagreement_.clear();
        place = std::move(caller);
    }

    [[noreturn]] void give_up() const {
        for (const auto& joined : joined_)
            if (joined && !disagreement_.empty()) answer(*joined, {greeting, other_plan, 0, {}}, {});
        if (!disagreement_.empty()) refuse("{}", disagreement_);
        std::string list;
        int named = 0;
        for (std::size_t r = 1; r < joined_.size(); ++r)
            if (!joined_[r] && named++ < 8) list += (list.empty() ? "" : ", ") + std::to_string(r);
        fail("{} of {} processes have come to port {}; ranks {} have not: were they started?", come(), launch_.world,
             launch_.port, list + (named > 8 ? ", ..." : ""));
    }

    Meeting welcome_all() {
        Meeting meeting;
        std::vector<Place> places(joined_.size());
        const Nonce drawn = draw_nonce();
        Answer welcome_answer;
        std::memcpy(&welcome_answer.run, drawn.data(), sizeof welcome_answer.run);
        for (std::size_t r = 1; r < joined_.size(); ++r) {
            std::strncpy(places[r].host, joined_[r]->host.c_str(), sizeof places[r].host - 1);
            places[r].port = joined_[r]->hello.port;
        }
        for (auto& joined : joined_) {
            if (joined) answer(*joined, welcome_answer, places);
            meeting.sockets.push_back(joined ? joined->socket.release() : -1);
        }
        meeting.run = fmt::format("-{:016x}", welcome_answer.run);
        meeting.listener = reception_.close();
        return meeting;
    }

    const Launch& launch_;
    std::uint64_t fingerprint_;
    Deadline deadline_;
    Reception reception_;
    std::vector<std::optional<Joined>> joined_; // by rank
    std::string disagreement_;                  // of the last rank whose plan or world is another
    int disagreeing_ = -1;
    std::optional<Deadline> disagreement_end_;
};

// Listens at the interface that leads to rank 0.
Socket listener_beside(int socket) {
    const std::string host = own_host(socket);
    for (const Address& address : addresses_of(host, 0))
        if (Socket listener = listen_at(address); listener.get() >= 0) return listener;
    fail("cannot listen at {}: {}", host, system_reason(errno));
}

Meeting meet_as_other(const Launch& launch, std::uint64_t fingerprint, double patience) {
    const Deadline deadline(patience);
    require_token_or_loopback(launch, launch.host, "MASTER_ADDR");
    Meeting meeting;
    meeting.sockets.assign(static_cast<std::size_t>(launch.world), -1);
    Socket first = call_until(launch.host, launch.port, deadline, 0);
    Reception reception(listener_beside(first.get()), launch);
    Hello hello{greeting, launch.rank, launch.world, reception.port(), fingerprint, {}, {}};
    Nonce challenge{};
    bool over = false;
    Answer answer;
    const bool heard = say_hello(first.get(), hello, challenge, launch.token, deadline, over) &&
                       read_bytes(first.get(), &answer, sizeof answer, deadline) && answer.magic == greeting;
    if (over)
        fail("rank 0 at {}:{} has begun its run without this rank {}: it comes too late", launch.host, launch.port,
             launch.rank);
    if (!heard)
        fail("rank 0 at {}:{} has ended before all processes had come, or has another job token", launch.host,
             launch.port);
    std::vector<Place> places(answer.refused == welcome ? meeting.sockets.size() : 0);
    if (!read_bytes(first.get(), places.data(), places.size() * sizeof(Place), deadline))
        fail("rank 0 at {}:{} has ended before all processes had met", launch.host, launch.port);
    if (!engine::same_digest(answer.proof, proof_of(answer, hello, challenge, places, launch.token)))
        fail("who answers at {}:{} does not know this job's token: is MASTER_PORT another job's?", launch.host,
             launch.port);
    if (answer.refused == rank_taken) fail("another process of this run says that it is rank {}", launch.rank);
    if (answer.refused != welcome)
        refuse("rank 0 found processes of {}: start all with the same command",
               answer.refused == other_world ? "another number of processes" : "another plan or other options");
    meeting.run = fmt::format("-{:016x}", answer.run);
    meeting.sockets[0] = first.release();
    for (int r = 1; r < launch.rank; ++r) {
        Place& place = places[static_cast<std::size_t>(r)];
        place.host[sizeof place.host - 1] = '\0';
        Socket socket = call_until(place.host, place.port, deadline, r);
        if (!say_hello(socket.get(), hello, challenge, launch.token, deadline, over))
            fail("rank {} at {}:{} has ended before all processes had met", r, place.host, place.port);
        meeting.sockets[static_cast<std::size_t>(r)] = socket.release();
    }
    for (int come = launch.rank + 1; come < launch.world;) {
        if (deadline.over()) fail("{} of {} processes have called rank {}", come, launch.world, launch.rank);
        reception.serve(0.2, [&](const Hello& other, const Nonce&, Socket socket) {
            if (other.fingerprint != fingerprint || other.rank <= launch.rank || other.rank >= launch.world) return;
            int& place = meeting.sockets[static_cast<std::size_t>(other.rank)];
            if (place >= 0) return;
            place = socket.release();
            ++come;
        });
    }
    return meeting;
}

} // namespace

Meeting meet_processes(const Launch& launch, std::uint64_t fingerprint, double patience) {
    Meeting meeting =
        launch.rank == 0 ? First(launch, fingerprint, patience).meet() : meet_as_other(launch, fingerprint, patience);
    for (const int socket : meeting.sockets)
        if (socket >= 0) tune(socket);
    return meeting;
}

void turn_away(int listener) {
    const Socket socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const Challenge over{greeting, 1, {}};
    if (socket.get() >= 0) write_some(socket.get(), &over, sizeof over);
}

} // namespace moe::comm
