// Who may speak to the page's server: the holder of its token, by an address of this machine, from its own page.
#pragma once

#include <string>
#include <string_view>

namespace moe::tools::ui {

// 128 random bits of the kernel as 32 hexadecimal digits. Throws Error (failure).
std::string random_token();

struct Asked {                           // what of a request says who it comes from; absent headers are empty
    std::string_view host, origin, site; // Host, Origin, Sec-Fetch-Site
    std::string_view token;              // of the query or of the header X-Moe-Plan-Token
};

class Guard {
public:
    // listen: the address that the server was told to listen on, which a Host header may name.
    Guard(std::string token, std::string listen, int port)
        : token_(std::move(token)), listen_(std::move(listen)), port_(port) {}
    const std::string& token() const { return token_; }
    // Empty where the request may pass, else a line that says why not. A name in Host other than localhost or `listen`
    // is refused, since any name can be made to point here (DNS rebinding); an Origin must be that of Host.
    std::string refusal(const Asked& asked) const;

private:
    bool own_host(std::string_view host) const;
    std::string token_, listen_;
    int port_;
};

} // namespace moe::tools::ui
