// A pickle as data: nothing that it names is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace moe::weights {

// What Python's pickle module writes by protocols 2 to 5 (Lib/pickletools.py lists its opcodes). Calls and classes
// become values that say which: only those of `allowed` may be named. One value stands for each opcode at most, so that
// memory follows the bytes; a value may be part of several others, and of itself.
class Pickle {
public:
    // object: what `type` makes of `items`; persistent: what the writer keeps elsewhere under items[0].
    enum class Kind { none, boolean, integer, real, text, list, dict, global, object, persistent };
    struct Value {
        Kind kind = Kind::none;
        std::int64_t integer = 0; // boolean: 0 or 1
        double real = 0;
        std::string text;                // bytes too; global: "module.name"
        std::vector<const Value*> items; // list, tuple and set: elements; object: arguments
        std::vector<const Value*> pairs; // dict, and object that is one: keys and values in turn
        const Value* type = nullptr;     // object: a global
        const Value* state = nullptr;    // object: null where it has none
    };

    // Throws Error (bad_input) "PLACE: ..." for what is no such pickle, has another opcode or names what is not
    // allowed.
    Pickle(std::string_view bytes, const std::string& place, const std::set<std::string>& allowed);

    const Value& root() const { return *root_; }

private:
    friend class PickleReader;
    std::deque<Value> values_;
    const Value* root_ = nullptr;
};

// The value of an object's or dict's field; null where there is none.
const Pickle::Value* field_of(const Pickle::Value& value, std::string_view name);
// Whether it is an object of this class, as "module.name".
bool is_object(const Pickle::Value& value, std::string_view type);

} // namespace moe::weights
