// One HTTP request from a socket and its response: bounded in size and time, parsed by Boost.Beast.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace moe::tools::ui {

// What a client may take of the server before it is refused.
struct HttpLimits {
    std::size_t header = 16 << 10, body = 4 << 20; // bytes
    std::chrono::milliseconds patience{10000};     // until the request is whole, and for each piece of the response
};

struct HttpRequest {
    std::string method, target;                  // target: path and query
    std::string host, origin, site, token, type; // headers Host, Origin, Sec-Fetch-Site, X-Moe-Plan-Token, Content-Type
    std::string body;
};

// A connection that answers one request and is closed with the object.
class Connection {
public:
    explicit Connection(int socket) : socket_(socket) {}
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    // None where the client went away or was not sound; it has then been answered with 400, 408, 413 or 431.
    std::optional<HttpRequest> read(const HttpLimits& limits);
    // A whole response; headers: further lines, each with \r\n.
    void answer(int status, const std::string& type, std::string_view body, const std::string& headers = {});
    // Starts a stream of server-sent events, to which event() adds one each.
    void start_events();
    void event(const std::string& name, std::string_view data);
    // Whether nobody reads any more; every write is lost then.
    bool gone();
    int socket() const { return socket_; }

private:
    void send(std::string_view text);
    void take_the_rest();
    int socket_;
    bool lost_ = false;
};

} // namespace moe::tools::ui
