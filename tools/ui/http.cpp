// Reads a request piece by piece into Beast's parser, and writes responses.
#include "tools/ui/http.hpp"

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <fmt/format.h>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace moe::tools::ui {

namespace {

namespace http = boost::beast::http;
using Clock = std::chrono::steady_clock;

// Sent with every response: nothing is kept, guessed at or shown inside another page.
constexpr std::string_view common_headers = "Cache-Control: no-store\r\n"
                                            "X-Content-Type-Options: nosniff\r\n"
                                            "X-Frame-Options: DENY\r\n"
                                            "Cross-Origin-Resource-Policy: same-origin\r\n"
                                            "Cross-Origin-Opener-Policy: same-origin\r\n"
                                            "Referrer-Policy: no-referrer\r\n"
                                            "Connection: close\r\n";

// Whether the socket is ready for `events` before the deadline.
bool ready(int socket, short events, Clock::time_point deadline) {
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (left <= 0) return false;
        pollfd one{socket, events, 0};
        const int count = poll(&one, 1, static_cast<int>(left));
        if (count > 0) return true;
        if (count < 0 && errno != EINTR) return false;
    }
}

std::string text(boost::beast::string_view view) { return {view.data(), view.size()}; }

HttpRequest request_of(http::request<http::string_body>&& message) {
    HttpRequest request;
    request.method = text(message.method_string());
    request.target = text(message.target());
    request.host = text(message[http::field::host]);
    request.origin = text(message[http::field::origin]);
    request.site = text(message["Sec-Fetch-Site"]);
    request.token = text(message["X-Moe-Plan-Token"]);
    request.type = text(message[http::field::content_type]);
    request.body = std::move(message.body());
    return request;
}

} // namespace

Connection::~Connection() {
    shutdown(socket_, SHUT_RDWR);
    close(socket_);
}

std::optional<HttpRequest> Connection::read(const HttpLimits& limits) {
    const Clock::time_point deadline = Clock::now() + limits.patience;
    http::request_parser<http::string_body> parser;
    parser.header_limit(static_cast<std::uint32_t>(limits.header));
    parser.body_limit(limits.body);
    parser.eager(true);
    std::string waiting; // bytes that the parser has not taken yet
    std::array<char, 16384> piece;
    while (!parser.is_done()) {
        if (!ready(socket_, POLLIN, deadline)) {
            answer(408, "text/plain", "the request did not come whole in time\n");
            return {};
        }
        const ssize_t count = recv(socket_, piece.data(), piece.size(), 0);
        if (count <= 0) return {}; // the client left
        waiting.append(piece.data(), static_cast<std::size_t>(count));
        boost::beast::error_code error;
        waiting.erase(0, parser.put(boost::asio::buffer(waiting), error));
        if (!error || error == http::error::need_more) continue;
        if (error == http::error::body_limit)
            answer(413, "text/plain", fmt::format("a request may hold {} MiB at most\n", limits.body >> 20));
        else if (error == http::error::header_limit)
            answer(431, "text/plain", fmt::format("headers may hold {} KiB at most\n", limits.header >> 10));
        else
            answer(400, "text/plain", "this is no HTTP request\n");
        take_the_rest();
        return {};
    }
    return request_of(parser.release());
}

// A client that still sends when its connection closes would never see the answer.
void Connection::take_the_rest() {
    shutdown(socket_, SHUT_WR);
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(2);
    std::array<char, 16384> piece;
    while (ready(socket_, POLLIN, deadline) && recv(socket_, piece.data(), piece.size(), 0) > 0) {
    }
}

void Connection::send(std::string_view text) {
    while (!lost_ && !text.empty()) {
        const ssize_t count = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0)
            text.remove_prefix(static_cast<std::size_t>(count));
        else if (count < 0 && (errno == EAGAIN || errno == EINTR))
            lost_ = !ready(socket_, POLLOUT, Clock::now() + HttpLimits{}.patience);
        else
            lost_ = true;
    }
}

void Connection::answer(int status, const std::string& type, std::string_view body, const std::string& headers) {
    const boost::beast::string_view reason = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(status)));
    send(fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\n{}{}\r\n", status,
                     text(reason), type, body.size(), common_headers, headers));
    send(body);
}

void Connection::start_events() {
    send(fmt::format("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n{}\r\n", common_headers));
}

void Connection::event(const std::string& name, std::string_view data) {
    std::string out = "event: " + name + "\n";
    for (std::size_t at = 0; at < data.size();) {
        const std::size_t end = std::min(data.find('\n', at), data.size());
        out.append("data: ").append(data.substr(at, end - at)).append("\n");
        at = end + 1;
    }
    send(out + "\n");
}

bool Connection::gone() {
    if (lost_) return true;
    pollfd one{socket_, POLLRDHUP, 0};
    if (poll(&one, 1, 0) > 0) lost_ = true;
    return lost_;
}

} // namespace moe::tools::ui
