// Ranks that talk over sockets, all in one process: a thread for each, as if it were a process of its own.
#pragma once

#include "engine/comm/processes.hpp"

#include <functional>
#include <string>
#include <vector>

// A port that was free a moment ago.
int free_port();

bool has_ipv6(); // its loopback address

// Runs body(transport) for each of `world` ranks, which meet at `host`, and says farewell; rethrows the first failure.
void on_transports(int world, const std::function<void(moe::comm::Transport&)>& body,
                   const std::string& host = "127.0.0.1");

// The message that each rank fails with, "" where it does not.
std::vector<std::string> failures(int world, moe::comm::Transport::Limits limits,
                                  const std::function<void(moe::comm::Transport&)>& body,
                                  const std::string& host = "127.0.0.1");
