// The local server of the page: a thread for each connection, a process for each request that computes.
#pragma once

#include "tools/ui/http.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

namespace moe::tools::ui {

struct ServerOptions {
    std::string listen = "127.0.0.1"; // IPv4 or IPv6 address
    int port = 0;                     // 0: a free one
    std::string page;                 // the HTML document
    HttpLimits limits;
    int most_connections = 32, most_workers = 4;
    std::chrono::seconds longest{600};               // of one worker
    std::size_t most_answer = std::size_t{64} << 20; // bytes of one worker
};

// Serves until SIGINT or SIGTERM; `announce` gets the page's address with its token once the port is open. All workers
// have ended when it returns. Throws Error (bad_input) where the address cannot be listened on.
void serve(const ServerOptions& options, const std::function<void(const std::string& address)>& announce);

} // namespace moe::tools::ui
