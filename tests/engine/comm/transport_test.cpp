// Processes of one run: how they are told their place, how they meet, and what the others say when one is gone.
#include "engine/comm/launch.hpp"
#include "planner/base/error.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/comm/gang.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

using namespace moe;

namespace {

// Sets variables for its lifetime, and no other launcher's.
class Environment {
public:
    explicit Environment(const std::map<std::string, std::string>& variables) {
        for (const char* name : names) ::unsetenv(name);
        for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    }
    ~Environment() {
        for (const char* name : names) ::unsetenv(name);
    }

private:
    static constexpr const char* names[] = {"RANK",
                                            "WORLD_SIZE",
                                            "MASTER_ADDR",
                                            "MASTER_PORT",
                                            "OMPI_COMM_WORLD_RANK",
                                            "OMPI_COMM_WORLD_SIZE",
                                            "SLURM_PROCID",
                                            "SLURM_NTASKS",
                                            "SLURM_NNODES",
                                            "MOE_PLAN_JOB_TOKEN"};
};

std::string refusal(const std::map<std::string, std::string>& variables) {
    const Environment environment(variables);
    try {
        comm::launch_of_environment();
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("launch: the variables of torchrun, Open MPI and Slurm") {
    const auto launched = [](const std::map<std::string, std::string>& variables) {
        const Environment environment(variables);
        return comm::launch_of_environment();
    };
    CHECK_FALSE(launched({}));
    CHECK_FALSE(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
    CHECK_FALSE(launched({{"SLURM_NTASKS", "8"}})); // a shell of salloc
    const auto torchrun =
        launched({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "1234"}});
    REQUIRE(torchrun);
    CHECK(torchrun->rank == 3);
    CHECK(torchrun->world == 8);
    CHECK(torchrun->host == "node7");
    CHECK(torchrun->port == 1234);
    CHECK(torchrun->token.empty());
    const auto with_token = launched({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MOE_PLAN_JOB_TOKEN", "sixteen letters."}});
    REQUIRE(with_token);
    CHECK(with_token->token == "sixteen letters.");
    CHECK(mentions(refusal({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MOE_PLAN_JOB_TOKEN", "fifteen letters"}}),
                   "MOE_PLAN_JOB_TOKEN: has 15 characters"));
    const auto mpirun = launched({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}});
    REQUIRE(mpirun);
    CHECK(mpirun->rank == 1);
    CHECK(mpirun->host == "127.0.0.1");
    const auto brackets = launched({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "[fd00::7]"}});
    REQUIRE(brackets);
    CHECK(brackets->host == "fd00::7");
    const auto srun = launched({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "1"}});
    REQUIRE(srun);
    CHECK(srun->world == 4);
    CHECK(mentions(refusal({{"RANK", "0"}}), "RANK = 0, but WORLD_SIZE is not set"));
    CHECK(mentions(refusal({{"RANK", "8"}, {"WORLD_SIZE", "8"}}), "from 0 to 7"));
    CHECK(mentions(refusal({{"RANK", "x"}, {"WORLD_SIZE", "8"}}), "RANK = x"));
    CHECK(mentions(refusal({{"RANK", "1"}, {"WORLD_SIZE", "8"}, {"MASTER_PORT", "99999"}}), "MASTER_PORT = 99999"));
    CHECK(mentions(refusal({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "8"}, {"SLURM_NNODES", "2"}}),
                   "MASTER_ADDR is not set"));
}

TEST_CASE("transport: messages of a channel keep their order, whatever their sizes, to oneself as well") {
    on_transports(3, [](comm::Transport& t) {
        std::vector<char> data(3'000'000);
        for (std::size_t i = 0; i < data.size(); ++i)
            data[i] = static_cast<char>(i * 7 + static_cast<std::size_t>(t.rank()));
        for (int to = 0; to < t.world(); ++to)
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, data.size(), std::size_t{17}}) {
                t.send(to, 5, data.data(), bytes);
                t.send(to, 6, data.data(), bytes / 2);
            }
        for (int from = 0; from < t.world(); ++from) {
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, data.size(), std::size_t{17}}) {
                const std::vector<char> half = t.receive(from, 6);
                const std::vector<char> whole = t.receive(from, 5);
                bool right = whole.size() == bytes && half.size() == bytes / 2;
                for (std::size_t i = 0; right && i < bytes; ++i)
                    right = whole[i] == static_cast<char>(i * 7 + static_cast<std::size_t>(from));
                if (!right) fail("rank {} got something else from rank {}", t.rank(), from);
            }
        }
        char word = t.rank() == 2 ? 'x' : ' ';
        t.broadcast(2, {&word, 1});
        if (word != 'x' || t.any(false) || !t.any(t.rank() == 1)) fail("rank {} was told something else", t.rank());
    });
}

TEST_CASE("transport: processes meet at addresses of either family, and at a name") {
    for (const std::string host : {"127.0.0.1", "::1", "localhost"}) {
        CAPTURE(host);
        if (host == "::1" && !has_ipv6()) {
            MESSAGE("skipped: this machine has no IPv6");
            continue;
        }
        on_transports(
            3,
            [](comm::Transport& t) {
                char word = t.rank() == 1 ? 'x' : ' ';
                t.broadcast(1, {&word, 1}); // ranks 1 and 2 called each other at the places that rank 0 told
                if (word != 'x') fail("rank {} was told something else", t.rank());
            },
            host);
    }
}

TEST_CASE("transport: who waits for a rank that died says so, and so do all others") {
    const auto why = failures(4, {}, [](comm::Transport& t) {
        if (t.rank() == 2) throw std::runtime_error("rank 2: adamw (layer 3): out of luck");
        t.receive(t.rank() == 0 ? 2 : 0, 1); // 1 and 3 wait for 0, which waits for 2
    });
    for (const std::string& reason : why) CHECK(reason == "rank 2: adamw (layer 3): out of luck");
    const auto gone = failures(3, {}, [](comm::Transport& t) {
        if (t.rank() != 1) t.receive(1, 1);
    });
    CHECK(mentions(gone[0] + gone[2], "rank 1 has ended"));
}

TEST_CASE("transport: a rank that sends nothing it owes, but lives, is waited for") {
    const auto why = failures(2, {30.0, 1.5}, [](comm::Transport& t) {
        const char word = 'x';
        if (t.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(3)); // twice the patience
        if (t.rank() == 1) t.send(0, 1, &word, 1);
        if (t.rank() == 0) t.receive(1, 1);
    });
    CHECK(why == std::vector<std::string>{"", ""});
}

TEST_CASE("transport: processes that do not come, come twice or run something else are named") {
    const int port = free_port();
    std::string missing, other, first;
    std::thread([&] {
        try {
            comm::Transport transport({0, 3, "127.0.0.1", port}, 1, {0.5, 5.0});
        } catch (const Error& error) {
            missing = error.what();
        }
    }).join();
    CHECK(mentions(missing, "1 of 3 processes have come"));
    CHECK(mentions(missing, "ranks 1, 2 have not"));
    std::thread root([&] {
        try {
            comm::Transport transport({0, 2, "127.0.0.1", port}, 1, {20.0, 5.0});
        } catch (const Error& error) {
            first = error.what();
        }
    });
    try {
        comm::Transport transport({1, 2, "127.0.0.1", port}, 2, {20.0, 5.0});
    } catch (const Error& error) {
        other = error.what();
    }
    root.join();
    CHECK(mentions(first, "rank 1 runs another plan or other options"));
    CHECK(mentions(other, "another plan or other options"));
}
