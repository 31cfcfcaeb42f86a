// Accepts connections, lets the guard judge them, and answers with the page or with the events of one verb's run.
#include "tools/ui/server.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tools/ui/guard.hpp"
#include "tools/ui/requests.hpp"
#include "tools/ui/worker.hpp"

#include <nlohmann/json.hpp>

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <system_error>
#include <thread>

namespace moe::tools::ui {

namespace {

using Json = nlohmann::ordered_json;

std::string system_text() { return std::generic_category().message(errno); }

class Descriptor {
public:
    explicit Descriptor(int value) : value_(value) {}
    ~Descriptor() {
        if (value_ >= 0) close(value_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int value() const { return value_; }

private:
    int value_;
};

// A folder of its own for one request, gone with the object.
class Scratch {
public:
    Scratch() {
        path_ = (std::filesystem::temp_directory_path() / "moe-plan-ui-XXXXXX").string();
        if (mkdtemp(path_.data()) == nullptr) fail("cannot make a folder {}: {}", path_, system_text());
    }
    ~Scratch() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

// Takes one of a bounded number of places for as long as the object lives.
class Place {
public:
    Place(std::atomic<int>& taken, int most) : taken_(taken), mine_(taken.fetch_add(1) < most) {}
    ~Place() { taken_.fetch_sub(1); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    bool mine() const { return mine_; }

private:
    std::atomic<int>& taken_;
    bool mine_;
};

// An open port at an address.
int open_port(const std::string& listen, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
    if (getaddrinfo(listen.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
        refuse("--listen {}: must be an IPv4 or IPv6 address, such as 127.0.0.1", listen);
    const int one = 1;
    const int socket = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool open = socket >= 0 && setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                      bind(socket, found->ai_addr, found->ai_addrlen) == 0 && ::listen(socket, 64) == 0;
    const std::string why = system_text();
    freeaddrinfo(found);
    if (!open) refuse("cannot listen on {} port {}: {}; choose another by --port", listen, port, why);
    return socket;
}

int port_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                               : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// The value of `token` in a query.
std::string token_of(const std::string& query) {
    constexpr std::string_view name = "token=";
    return query.starts_with(name) ? query.substr(name.size()) : std::string();
}

class Server {
public:
    Server(const ServerOptions& options, int socket)
        : options_(options), socket_(socket), guard_(random_token(), options.listen, port_of(socket)) {}

    // Address of the page; anything is reached by the loopback address too.
    std::string address() const {
        const bool any = options_.listen == "0.0.0.0" || options_.listen == "::";
        const std::string host = any ? "127.0.0.1" : options_.listen;
        return fmt::format("http://{}:{}/?token={}", host.find(':') == std::string::npos ? host : "[" + host + "]",
                           port_of(socket_), guard_.token());
    }

    // Accepts until `signals` can be read, then ends all workers and waits for the threads.
    void run(int signals) {
        std::array<pollfd, 2> sources{{{socket_, POLLIN, 0}, {signals, POLLIN, 0}}};
        for (;;) {
            if (poll(sources.data(), sources.size(), -1) < 0 && errno == EINTR) continue;
            if (sources[1].revents != 0) break;
            const int client = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
            if (client < 0) continue;
            ++threads_;
            std::thread([this, client] {
                handle(client);
                --threads_;
            }).detach();
        }
        stopping_ = true;
        while (threads_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }

private:
    void handle(int client) {
        Connection connection(client);
        const Place place(connections_, options_.most_connections);
        if (!place.mine()) return connection.answer(503, "text/plain", "too many connections\n");
        try {
            if (const auto request = connection.read(options_.limits)) respond(connection, *request);
        } catch (const std::exception& error) { // such as memory: this request alone is lost
            connection.event("refused", Json{{"status", 1}, {"line", error.what()}}.dump());
        }
    }

    void respond(Connection& connection, const HttpRequest& request) {
        const std::size_t end = std::min(request.target.find('?'), request.target.size());
        const std::string path = request.target.substr(0, end);
        const std::string query = end < request.target.size() ? request.target.substr(end + 1) : "";
        const bool page = path == "/";
        const std::string token = page ? token_of(query) : request.token;
        // A link from elsewhere may open the page; only the page itself may ask for more.
        const std::string why = guard_.refusal({request.host, request.origin, page ? "" : request.site, token});
        if (!why.empty()) return connection.answer(403, "text/plain", why + "\n");
        if (page) {
            if (request.method != "GET") return connection.answer(405, "text/plain", "GET only\n", "Allow: GET\r\n");
            return connection.answer(200, "text/html", options_.page);
        }
        constexpr std::string_view api = "/api/";
        if (!path.starts_with(api)) return connection.answer(404, "text/plain", "no such page\n");
        if (request.method != "POST") return connection.answer(405, "text/plain", "POST only\n", "Allow: POST\r\n");
        if (!request.type.starts_with("application/json"))
            return connection.answer(415, "text/plain", "application/json only\n");
        compute(connection, path.substr(api.size()), request.body);
    }

    // One verb's run as events: progress and note while it runs, then result or refused.
    void compute(Connection& connection, const std::string& name, const std::string& body) {
        const Place place(workers_, options_.most_workers);
        if (!place.mine())
            return connection.answer(503, "text/plain", "as many searches run as may at a time: try again later\n");
        const Scratch folder;
        VerbCall call;
        try {
            call = call_of(name, body, folder.path());
        } catch (const Error& error) {
            return connection.answer(400, "text/plain", std::string(error.what()) + "\n");
        }
        connection.start_events();
        WorkerCalls calls;
        calls.line = [&connection](std::string_view line) {
            constexpr std::string_view progress = "progress: ";
            if (line.starts_with(progress))
                connection.event("progress", line.substr(progress.size()));
            else
                connection.event("note", line);
        };
        calls.cancelled = [this, &connection] { return stopping_ || connection.gone(); };
        const WorkerResult done = run_worker(call.words, folder.path(), calls, options_.longest, options_.most_answer);
        if (done.cancelled) return;
        if (done.status != 0) {
            constexpr auto replace = Json::error_handler_t::replace;
            return connection.event(
                "refused", Json{{"status", done.status}, {"line", done.last_line}}.dump(-1, ' ', false, replace));
        }
        const std::string answer =
            call.result.empty() ? done.out : read_file(folder.path() + "/" + call.result, options_.most_answer);
        connection.event("result", call.text ? Json{{"text", answer}}.dump() : answer);
    }

    const ServerOptions& options_;
    int socket_;
    Guard guard_;
    std::atomic<int> threads_ = 0, connections_ = 0, workers_ = 0;
    std::atomic<bool> stopping_ = false;
};

} // namespace

void serve(const ServerOptions& options, const std::function<void(const std::string& address)>& announce) {
    // Blocked before any thread starts, so that all of them leave these signals to run().
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, nullptr);
    const Descriptor signals(signalfd(-1, &ends, SFD_CLOEXEC)), socket(open_port(options.listen, options.port));
    Server server(options, socket.value());
    announce(server.address());
    server.run(signals.value());
}

} // namespace moe::tools::ui
