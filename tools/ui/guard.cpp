// Checks a request's Host, Origin and token.
#include "tools/ui/guard.hpp"

#include "planner/base/error.hpp"

#include <arpa/inet.h>
#include <sys/random.h>

#include <array>

namespace moe::tools::ui {

namespace {

// Takes as long wherever the first difference is.
bool same(std::string_view a, std::string_view b) {
    unsigned different = a.size() == b.size() ? 0U : 1U;
    for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
        different |= static_cast<unsigned>(static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]));
    return different == 0U;
}

bool is_address(const std::string& name) {
    std::array<unsigned char, sizeof(in6_addr)> bytes{};
    return inet_pton(AF_INET, name.c_str(), bytes.data()) == 1 || inet_pton(AF_INET6, name.c_str(), bytes.data()) == 1;
}

} // namespace

std::string random_token() {
    std::array<unsigned char, 16> bytes{};
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
        fail("cannot draw a token: the kernel gives no random bytes");
    std::string token;
    for (const unsigned char byte : bytes) token += fmt::format("{:02x}", byte);
    return token;
}

bool Guard::own_host(std::string_view host) const {
    const std::string port = fmt::format(":{}", port_);
    if (host.size() <= port.size() || !host.ends_with(port)) return false;
    std::string name(host.substr(0, host.size() - port.size()));
    if (name.size() > 2 && name.front() == '[' && name.back() == ']') name = name.substr(1, name.size() - 2);
    return name == "localhost" || name == listen_ || is_address(name);
}

std::string Guard::refusal(const Asked& asked) const {
    if (!own_host(asked.host)) return "the Host header names another server than this one";
    if (!asked.origin.empty() && asked.origin != "http://" + std::string(asked.host))
        return "the Origin header names another page than this server's";
    if (asked.site == "cross-site") return "another site's page asks";
    if (!same(asked.token, token_)) return "the token is missing or wrong: open the address that moe-plan ui printed";
    return {};
}

} // namespace moe::tools::ui
