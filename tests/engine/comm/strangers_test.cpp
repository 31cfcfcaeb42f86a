// Callers at a rendezvous that are none of ours, ranks that come twice or late, and messages that nobody can have sent.
#include "engine/comm/reception.hpp"
#include "engine/comm/transport.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/comm/gang.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using namespace moe;

namespace {

const std::string token = "a word of sixteen letters and more";
constexpr std::uint64_t fingerprint = 7;

// Rank 0 of a run whose processes know the token, meeting in a thread of its own.
class Root {
public:
    Root(int world, double patience) : port_(free_port()), world_(world) {
        comm::Launch launch = member(0);
        launch.say = [this](const std::string& line) {
            const std::lock_guard<std::mutex> held(mutex_);
            said_ += line + "\n";
        };
        thread_ = std::thread([this, launch, patience] {
            try {
                transport_ =
                    std::make_unique<comm::Transport>(launch, fingerprint, comm::Transport::Limits{patience, 5.0});
            } catch (const Error& error) {
                failure_ = error.what();
            }
        });
    }
    ~Root() {
        if (thread_.joinable()) thread_.join();
    }
    // The launch of rank r of the same run.
    comm::Launch member(int rank) const { return {rank, world_, "127.0.0.1", port_, 0, token}; }
    std::unique_ptr<comm::Transport> join(int rank) const {
        return std::make_unique<comm::Transport>(member(rank), fingerprint, comm::Transport::Limits{20.0, 5.0});
    }
    comm::Socket call() const { return comm::call_until("127.0.0.1", port_, comm::Deadline(20.0), 0); }
    // Waits for the meeting; "" where it came to an end, else why it failed.
    std::string met() {
        thread_.join();
        return failure_;
    }
    comm::Transport& transport() { return *transport_; }
    // True as soon as rank 0 has said so.
    bool says(const std::string& words) {
        for (int i = 0; i < 1000; ++i) {
            {
                const std::lock_guard<std::mutex> held(mutex_);
                if (mentions(said_, words)) return true;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        return false;
    }

private:
    int port_, world_;
    std::thread thread_;
    std::mutex mutex_;
    std::string said_, failure_;
    std::unique_ptr<comm::Transport> transport_;
};

struct Greeted {
    comm::Socket socket;
    comm::Hello hello; // as it was sent
};

// Says hello as the hello's rank of the hello's world.
Greeted greet(const Root& root, comm::Hello hello, const std::string& word) {
    comm::Socket socket = root.call();
    comm::Nonce challenge{};
    bool over = false;
    CHECK(comm::say_hello(socket.get(), hello, challenge, word, comm::Deadline(20.0), over));
    return {std::move(socket), hello};
}

comm::Hello hello_of(int rank, int world) { return {comm::greeting, rank, world, 1, fingerprint, {}, {}}; }

// True once the other side has closed the connection.
bool closed(const comm::Socket& socket) {
    const comm::Deadline deadline(20.0);
    char byte = 0;
    while (comm::read_bytes(socket.get(), &byte, 1, deadline)) continue;
    return !deadline.over();
}

} // namespace

// Were idle callers served one behind the other, each would hold the meeting up for the patience with a hello.
TEST_CASE("rendezvous: 25 idle callers delay nobody") {
    static_assert(comm::Reception::patience * 25 > 10.0);
    Root root(2, 10.0);
    std::vector<comm::Socket> idle;
    for (int i = 0; i < 25; ++i) idle.push_back(root.call());
    std::unique_ptr<comm::Transport> other = root.join(1);
    CHECK(root.met() == "");
}

TEST_CASE("rendezvous: more idle callers than there is room for, and the ranks come in") {
    Root root(2, 20.0);
    std::vector<comm::Socket> idle;
    for (std::size_t i = 0; i < comm::Reception::most_callers + 20; ++i) idle.push_back(root.call());
    std::unique_ptr<comm::Transport> other = root.join(1);
    CHECK(root.met() == "");
}

TEST_CASE("rendezvous: strangers are sent away and said, and the run begins without them") {
    Root root(3, 60.0);
    SUBCASE("what is no hello") {
        const comm::Socket socket = root.call();
        comm::write_bytes(socket.get(), "GET / HTTP/1.1\r\n\r\n", 18);
        CHECK(root.says("what it says is no hello"));
        CHECK(closed(socket));
    }
    SUBCASE("a part of a hello") {
        {
            const comm::Socket socket = root.call();
            comm::write_bytes(socket.get(), &comm::greeting, sizeof comm::greeting);
        }
        CHECK(root.says("has gone without a hello"));
    }
    SUBCASE("a hello that goes on and on") {
        const comm::Socket socket = root.call();
        std::string flood(64 << 20, 'M');
        std::memcpy(flood.data(), &comm::greeting, sizeof comm::greeting);
        CHECK_FALSE(comm::write_bytes(socket.get(), flood.data(), flood.size()));
        CHECK(root.says("does not know this job's token"));
    }
    SUBCASE("another token") {
        const Greeted stranger = greet(root, hello_of(1, 3), "another word of sixteen letters");
        CHECK(root.says("does not know this job's token"));
        CHECK(closed(stranger.socket));
    }
    SUBCASE("no token") {
        const Greeted stranger = greet(root, hello_of(1, 3), "");
        CHECK(root.says("does not know this job's token"));
    }
    SUBCASE("a hello of before, said again") {
        const Greeted first = greet(root, hello_of(1, 3), token);
        const comm::Socket again = root.call();
        comm::write_bytes(again.get(), &first.hello, sizeof first.hello);
        CHECK(root.says("does not know this job's token"));
        ::shutdown(first.socket.get(), SHUT_RDWR); // which rank 1 was, and is no more
        CHECK(root.says("rank 1 has gone"));
    }
    SUBCASE("a process of another world, which may be started again as one of this") {
        const Greeted stranger = greet(root, hello_of(1, 2), token);
        CHECK(root.says("rank 1 was started as one of 2 processes, rank 0 as one of 3"));
    }
    std::unique_ptr<comm::Transport> one, two;
    std::thread rank_2([&] { two = root.join(2); });
    one = root.join(1);
    rank_2.join();
    REQUIRE(root.met() == "");
    // Those who met are those who know the token, whoever called before.
    std::thread rank_1([&] { one->send(0, 1, "x", 1); });
    char word = ' ';
    root.transport().receive(1, 1, {&word, 1});
    rank_1.join();
    CHECK(word == 'x');
}

TEST_CASE("rendezvous: a rank that dies before all have come may come again") {
    Root root(3, 60.0);
    greet(root, hello_of(1, 3), token); // and gone
    CHECK(root.says("rank 1 has gone before all had come"));
    std::unique_ptr<comm::Transport> two, one;
    std::thread rank_2([&] { two = root.join(2); });
    one = root.join(1);
    rank_2.join();
    CHECK(root.met() == "");
}

TEST_CASE("rendezvous: one rank twice, and ranks that come after the end, are told so at once") {
    Root root(3, 60.0);
    const auto failure = [&](int rank) {
        try {
            root.join(rank);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("no error");
    };
    {
        const Greeted early = greet(root, hello_of(2, 3), token);
        CHECK(mentions(failure(2), "another process of this run says that it is rank 2"));
    }
    CHECK(root.says("rank 2 has gone"));
    std::unique_ptr<comm::Transport> one, two;
    std::thread rank_1([&] { one = root.join(1); });
    two = root.join(2);
    rank_1.join();
    REQUIRE(root.met() == "");
    CHECK(mentions(failure(1), "has begun its run without this rank 1: it comes too late"));
}

TEST_CASE("rendezvous: another job at the same port is told from this one") {
    Root root(2, 60.0);
    comm::Launch other = root.member(1);
    other.token = "another word of sixteen letters";
    std::string why;
    try {
        comm::Transport(other, fingerprint, {20.0, 5.0});
    } catch (const Error& error) {
        why = error.what();
    }
    CHECK(mentions(why, "another job token"));
    std::unique_ptr<comm::Transport> own = root.join(1);
    CHECK(root.met() == "");
}

TEST_CASE("rendezvous: without a token only addresses of this machine are used") {
    const auto refused = [](comm::Launch launch) {
        return message([&] { comm::Transport(launch, fingerprint, {1.0, 1.0}); });
    };
    for (const int rank : {0, 1}) {
        const std::string line = refused({rank, 2, "192.0.2.1", 29500});
        CHECK(mentions(line, "MASTER_ADDR = 192.0.2.1"));
        CHECK(mentions(line, "set MOE_PLAN_JOB_TOKEN"));
    }
    comm::Launch open{0, 2, "127.0.0.1", 29500};
    open.listen = "0.0.0.0";
    CHECK(mentions(refused(open), "--listen = 0.0.0.0: other machines can reach it"));
}

TEST_CASE("transport: a length that nobody can send ends the connection, and the line names the rank") {
    Root root(2, 60.0);
    const comm::Launch one = root.member(1);
    const comm::Meeting meeting = comm::meet_processes(one, fingerprint, 20.0);
    REQUIRE(root.met() == "");
    const comm::Socket socket(meeting.sockets[0]);
    const std::uint64_t header[2] = {1, std::uint64_t{1} << 60};
    comm::write_bytes(socket.get(), header, sizeof header);
    std::string why;
    try {
        root.transport().receive(1, 1);
    } catch (const Error& error) {
        why = error.what();
    }
    CHECK(mentions(why, "rank 1 sends a message of 1152921504606846976 bytes, more than this machine's memory"));
    CHECK(root.transport().gone() == why);
}
