// The stack machine of pickles, with values in place of what they would make.
#include "engine/weights/pickle.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <bit>
#include <optional>
#include <unordered_map>

namespace moe::weights {

using Value = Pickle::Value;
using Kind = Pickle::Kind;

class PickleReader {
public:
    PickleReader(std::string_view bytes, const std::string& place, const std::set<std::string>& allowed, Pickle& pickle)
        : bytes_(bytes), place_(place), allowed_(allowed), values_(pickle.values_) {
        while (step()) {
        }
        if (stack_.size() != 1 || !marks_.empty()) fault();
        pickle.root_ = stack_.back();
    }

private:
    [[noreturn]] void fault() const {
        refuse("{}: byte {}: is no pickle, or a damaged one", place_, at_ > 0 ? at_ - 1 : 0);
    }

    std::string_view take(std::uint64_t size) {
        if (size > bytes_.size() - at_) fault();
        const std::string_view taken = bytes_.substr(at_, size);
        at_ += size;
        return taken;
    }
    std::uint64_t number(int size) {
        const std::string_view taken = take(static_cast<std::uint64_t>(size));
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < taken.size(); ++i)
            value |= static_cast<std::uint64_t>(static_cast<unsigned char>(taken[i])) << (8 * i);
        return value;
    }
    std::string line() {
        const std::size_t end = bytes_.find('\n', at_);
        if (end == std::string_view::npos) fault();
        std::string text(bytes_.substr(at_, end - at_));
        at_ = end + 1;
        return text;
    }

    Value& push(Kind kind) {
        Value& value = values_.emplace_back();
        value.kind = kind;
        stack_.push_back(&value);
        return value;
    }
    void push_integer(std::int64_t number) { push(Kind::integer).integer = number; }
    void push_text(std::uint64_t size) {
        const std::string_view text = take(size);
        push(Kind::text).text = text;
    }
    Value* pop() {
        if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fault();
        Value* value = stack_.back();
        stack_.pop_back();
        return value;
    }
    Value& top() {
        if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fault();
        return *stack_.back();
    }
    std::vector<const Value*> pop_to_mark() {
        if (marks_.empty()) fault();
        const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
        std::vector<const Value*> items(from, stack_.end());
        stack_.erase(from, stack_.end());
        marks_.pop_back();
        return items;
    }

    void push_long(std::uint64_t size) {
        if (size > 8) fault();
        std::uint64_t value = 0;
        const std::string_view taken = take(size);
        for (std::size_t i = 0; i < taken.size(); ++i)
            value |= static_cast<std::uint64_t>(static_cast<unsigned char>(taken[i])) << (8 * i);
        if (size > 0 && size < 8 && (taken.back() & 0x80) != 0) value |= ~std::uint64_t{0} << (8 * size);
        push_integer(static_cast<std::int64_t>(value));
    }
    void push_tuple(std::size_t size) {
        std::vector<const Value*> items(size);
        for (std::size_t i = size; i-- > 0;) items[i] = pop();
        push(Kind::list).items = std::move(items);
    }
    void push_global(const std::string& module, const std::string& name) {
        const std::string whole = module + "." + name;
        if (!allowed_.contains(whole))
            refuse("{}: names {}, which is no part of such a file; it is not read", place_, shown(whole));
        push(Kind::global).text = whole;
    }
    void push_object(const Value* type, const Value* arguments) {
        if (type->kind != Kind::global || arguments->kind != Kind::list) fault();
        Value& object = push(Kind::object);
        object.type = type;
        object.items = arguments->items;
    }
    void append(const std::vector<const Value*>& items) {
        Value& list = top();
        if (list.kind != Kind::list && list.kind != Kind::object) fault();
        list.items.insert(list.items.end(), items.begin(), items.end());
    }
    void set_items(const std::vector<const Value*>& items) {
        Value& dict = top();
        if ((dict.kind != Kind::dict && dict.kind != Kind::object) || items.size() % 2 != 0) fault();
        dict.pairs.insert(dict.pairs.end(), items.begin(), items.end());
    }
    void get(std::uint64_t index) {
        const auto known = memo_.find(index);
        if (known == memo_.end()) fault();
        stack_.push_back(known->second);
    }

    // One opcode; false behind the last.
    bool step() {
        const auto opcode = static_cast<unsigned char>(take(1).front());
        if (step_number(opcode) || step_container(opcode)) return true;
        switch (opcode) {
        case 0x80: { // PROTO
            if (const std::uint64_t protocol = number(1); protocol < 2 || protocol > 5)
                refuse("{}: is a pickle of protocol {}: 2 to 5 are read", place_, protocol);
            return true;
        }
        case 0x95:
            number(8);
            return true; // FRAME
        case 'c': {      // GLOBAL
            const std::string module = line();
            push_global(module, line());
            return true;
        }
        case 0x93: { // STACK_GLOBAL
            const Value *name = pop(), *module = pop();
            if (name->kind != Kind::text || module->kind != Kind::text) fault();
            push_global(module->text, name->text);
            return true;
        }
        case 'R':    // REDUCE
        case 0x81: { // NEWOBJ
            const Value *arguments = pop(), *type = pop();
            push_object(type, arguments);
            return true;
        }
        case 'b': { // BUILD
            const Value* state = pop();
            if (top().kind != Kind::object) fault();
            top().state = state;
            return true;
        }
        case 'Q': { // BINPERSID
            const Value* id = pop();
            push(Kind::persistent).items = {id};
            return true;
        }
        case 0x94:
            memo_[memo_.size()] = &top();
            return true; // MEMOIZE
        case 'q':
            memo_[number(1)] = &top();
            return true; // BINPUT
        case 'r':
            memo_[number(4)] = &top();
            return true; // LONG_BINPUT
        case 'h':
            get(number(1));
            return true; // BINGET
        case 'j':
            get(number(4));
            return true; // LONG_BINGET
        case '0':
            pop();
            return true; // POP
        case '.':
            return false; // STOP
        default:
            refuse("{}: byte {}: opcode {} is not read", place_, at_ - 1, opcode);
        }
    }

    bool step_number(unsigned char opcode) {
        switch (opcode) {
        case 'N':
            push(Kind::none);
            return true;
        case 0x88:
            push(Kind::boolean).integer = 1;
            return true;
        case 0x89:
            push(Kind::boolean);
            return true;
        case 'K':
            push_integer(static_cast<std::int64_t>(number(1)));
            return true;
        case 'M':
            push_integer(static_cast<std::int64_t>(number(2)));
            return true;
        case 'J':
            push_integer(static_cast<std::int32_t>(number(4)));
            return true;
        case 0x8A:
            push_long(number(1));
            return true;
        case 'G': { // eight bytes, the highest first
            std::uint64_t bits = 0;
            for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
            push(Kind::real).real = std::bit_cast<double>(bits);
            return true;
        }
        case 0x8C:
        case 'U':
        case 'C':
            push_text(number(1));
            return true;
        case 'X':
        case 'T':
        case 'B':
            push_text(number(4));
            return true;
        case 0x8D:
        case 0x8E:
            push_text(number(8));
            return true;
        default:
            return false;
        }
    }

    bool step_container(unsigned char opcode) {
        switch (opcode) {
        case '(':
            marks_.push_back(stack_.size());
            return true;
        case ')':
        case ']':
        case 0x8F:
            push(Kind::list);
            return true;
        case 0x85:
            push_tuple(1);
            return true;
        case 0x86:
            push_tuple(2);
            return true;
        case 0x87:
            push_tuple(3);
            return true;
        case 't':
        case 0x91: {
            std::vector<const Value*> items = pop_to_mark();
            push(Kind::list).items = std::move(items);
            return true;
        }
        case 'a': {
            const Value* item = pop();
            append({item});
            return true;
        }
        case 'e':
        case 0x90:
            append(pop_to_mark());
            return true;
        case '}':
            push(Kind::dict);
            return true;
        case 's': {
            const Value *value = pop(), *key = pop();
            set_items({key, value});
            return true;
        }
        case 'u':
            set_items(pop_to_mark());
            return true;
        default:
            return false;
        }
    }

    std::string_view bytes_;
    const std::string& place_;
    const std::set<std::string>& allowed_;
    std::deque<Value>& values_;
    std::vector<Value*> stack_;
    std::vector<std::size_t> marks_; // sizes of the stack
    std::unordered_map<std::uint64_t, Value*> memo_;
    std::size_t at_ = 0;
};

Pickle::Pickle(std::string_view bytes, const std::string& place, const std::set<std::string>& allowed) {
    PickleReader(bytes, place, allowed, *this);
}

const Value* field_of(const Value& value, std::string_view name) {
    const Value& fields = value.kind == Kind::object && value.state != nullptr ? *value.state : value;
    for (std::size_t i = 0; i + 1 < fields.pairs.size(); i += 2)
        if (fields.pairs[i]->kind == Kind::text && fields.pairs[i]->text == name) return fields.pairs[i + 1];
    return nullptr;
}

bool is_object(const Value& value, std::string_view type) {
    return value.kind == Kind::object && value.type->text == type;
}

} // namespace moe::weights
