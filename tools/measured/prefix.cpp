// Finds in a line's front which rank printed it, by what launchers and loggers put there.
#include "planner/base/digit.hpp"
#include "tools/measured/log_reader.hpp"

#include <cstddef>

namespace moe::tools {

namespace {

// A place in the front of a line, and steps over what stands there. A step that does not fit leaves the place.
class Front {
public:
    explicit Front(std::string_view line) : line_(line) {}

    std::size_t place() const { return at_; }
    void to(std::size_t place) { at_ = place; }
    void skip_blanks() {
        while (at_ < line_.size() && line_[at_] == ' ') ++at_;
    }
    bool text(std::string_view wanted) {
        const bool there = line_.substr(at_).starts_with(wanted);
        if (there) at_ += wanted.size();
        return there;
    }
    bool digits() {
        const std::size_t first = at_;
        while (at_ < line_.size() && is_digit(line_[at_])) ++at_;
        return fits(first, at_ > first && at_ - first <= 7);
    }
    // Letters, digits and -_. of a host or a role, with a letter or as an IP address, and with a digit where wanted.
    bool name(bool with_digit) {
        const std::size_t first = at_;
        bool letters = false, numbers = false;
        int dots = 0;
        for (; at_ < line_.size() && at_ - first < most_name; ++at_) {
            const char c = line_[at_];
            if (letter(c))
                letters = true;
            else if (is_digit(c))
                numbers = true;
            else if (c == '.')
                ++dots;
            else if (c != '-' && c != '_')
                break;
        }
        return fits(first, (letters || dots == 3) && (numbers || !with_digit));
    }
    // Everything up to one of these characters.
    bool until(char end) {
        const std::size_t found = line_.substr(0, at_ + most_name).find(end, at_);
        if (found == std::string_view::npos) return false;
        at_ = found + 1;
        return true;
    }
    std::string since(std::size_t begin) const { return std::string(line_.substr(begin, at_ - begin)); }

private:
    static constexpr std::size_t most_name = 80;

    static bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
    bool fits(std::size_t first, bool good) {
        if (!good) at_ = first;
        return good;
    }

    std::string_view line_;
    std::size_t at_ = 0;
};

} // namespace

std::string log_source(std::string_view line) {
    Front front(line);
    front.skip_blanks();
    const std::size_t begin = front.place();
    const auto again = [&] {
        front.to(begin);
        return true;
    };
    const bool rank =
        // srun --label, pdsh: "3: ", "node017: "
        (front.digits() && front.text(": ")) || (again() && front.name(true) && front.text(": ")) ||
        // torchrun --tee: "[rank3]:", "[default3]:"; others "[node017:3]:", "[3]:"
        (again() && front.text("[") && front.name(true) && front.text("]:")) ||
        (again() && front.text("[") && front.name(false) && front.text(":") && front.digits() && front.text("]:")) ||
        (again() && front.text("[") && front.digits() && front.text("]:")) ||
        // mpirun --tag-output: "[1,3]<stdout>:"
        (again() && front.text("[") && front.digits() && front.text(",") && front.digits() && front.text("]<std")) ||
        // Ray: "(RayWorker pid=7, ip=10.0.0.1)"
        (again() && front.text("(") && front.name(false) && front.text(" pid=") && front.until(')')) ||
        // torchx, NeMo-Run: "role/3 "
        (again() && front.name(false) && front.text("/") && front.digits() && front.text(" "));
    if (rank) return front.since(begin);
    // Primus: "[20251202 09:12:08][rank-7/8]["
    again();
    if (!front.text("[") || !front.until(']')) return "";
    const std::size_t behind = front.place();
    return front.text("[rank-") && front.digits() && front.text("/") && front.digits() ? front.since(behind) : "";
}

} // namespace moe::tools
