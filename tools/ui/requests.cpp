// Reads the body of each request and words it as a call of a verb.
#include "tools/ui/requests.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

namespace moe::tools::ui {

namespace {

constexpr std::int64_t many = std::int64_t{1} << 40; // the verbs have bounds of their own, with words for them

// A word that names no file.
std::string plain(const std::string& field, const std::string& word) {
    if (word.find('/') != std::string::npos || word.find('\0') != std::string::npos)
        refuse("{}: {}: a name or a value without a slash is needed; upload a file instead", field, word);
    return word;
}

// Adds "--OPTION=VALUE" where the request states `field`.
void add_word(VerbCall& call, const JsonObject& body, const std::string& field, const std::string& option) {
    if (!body.has(field)) return;
    if (const std::string word = body.string(field); !word.empty())
        call.words.push_back("--" + option + "=" + plain(field, word));
}

void add_number(VerbCall& call, const JsonObject& body, const std::string& field) {
    if (body.has(field)) call.words.push_back(fmt::format("--{}={}", field, body.integer(field, 0, many)));
}

void add_list(VerbCall& call, const JsonObject& body, const std::string& field) {
    if (!body.has(field)) return;
    for (const std::string& word : body.strings(field)) call.words.push_back("--" + field + "=" + plain(field, word));
}

// The model by its name, or the config.json that came along.
void add_model(VerbCall& call, const JsonObject& body, const std::string& folder) {
    if (body.has("config")) {
        write_file(folder + "/config.json", body.string("config"));
        call.words.emplace_back("--model=config.json");
    } else {
        add_word(call, body, "model", "model");
    }
}

// A plan's fields may name files as well, such as a stack or a histogram; model and hardware stand in it whole.
void write_plan(const JsonObject& body, const std::string& folder) {
    const JsonObject plan = body.object("plan");
    const auto check = [](const JsonObject& object) {
        for (const std::string& key : object.keys())
            if (object.is_string(key) && key != "schema") plain(key, object.string(key));
    };
    check(plan);
    for (const char* part : {"workload", "mesh"})
        if (plan.is_object(part)) check(plan.object(part));
    write_file(folder + "/plan.json", plan.dump());
}

VerbCall show_call(const JsonObject& body) {
    body.only({"what"});
    const std::string what = body.string("what");
    if (what != "models" && what != "hardware" && what != "stacks")
        body.refuse_value("what", "must be models, hardware or stacks");
    return {{"show", what, "--json"}, "", false};
}

VerbCall search_call(const JsonObject& body, const std::string& folder) {
    body.only({"model", "config", "hardware", "gpus", "gbs", "seq", "precision", "stack", "fix", "headroom", "top"});
    VerbCall call{{"search", "--json"}, "", false};
    add_model(call, body, folder);
    for (const char* field : {"hardware", "gpus", "precision", "stack"}) add_word(call, body, field, field);
    for (const char* field : {"gbs", "seq", "top"}) add_number(call, body, field);
    if (body.has("headroom"))
        call.words.push_back(fmt::format("--memory-headroom={}", body.number("headroom", 0.0, 1.0)));
    add_list(call, body, "fix");
    return call;
}

VerbCall plan_call(const JsonObject& body, const std::string& folder) {
    body.only({"plan", "set"});
    write_plan(body, folder);
    VerbCall call{{"replay", "plan.json", "--json", "--report=report.json"}, "report.json", false};
    add_list(call, body, "set");
    return call;
}

// The name of an uploaded file tells its format, and findings name it: letters, digits, dots and dashes of it stay.
std::string file_name(const std::string& given) {
    std::string name;
    for (const char c : given.substr(given.find_last_of("/\\") + 1))
        name += std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' ? c : '-';
    const std::size_t start = name.find_first_not_of(".-");
    return start == std::string::npos ? "file" : name.substr(start, 100);
}

VerbCall import_call(const JsonObject& body, const std::string& folder) {
    body.only({"name", "text", "model", "config", "hardware", "gpus", "stack", "from"});
    const std::string name = "dropped-" + file_name(body.string("name"));
    write_file(folder + "/" + name, body.string("text"));
    VerbCall call{{"import", name, "--alone", "--json"}, "", false};
    add_model(call, body, folder);
    for (const char* field : {"hardware", "stack", "from"}) add_word(call, body, field, field);
    add_number(call, body, "gpus");
    return call;
}

VerbCall launch_call(const JsonObject& body, const std::string& folder) {
    constexpr std::array<std::string_view, 7> engines{"slurm",      "mpi",       "megatron-lm",  "megatron-bridge",
                                                      "torchtitan", "automodel", "megatron-core"};
    body.only({"plan", "engine"});
    const std::string engine = body.string("engine");
    if (std::find(engines.begin(), engines.end(), engine) == engines.end())
        body.refuse_value("engine", fmt::format("must be one of {}", fmt::join(engines, ", ")));
    write_plan(body, folder);
    return {{"launch", "plan.json", "--" + engine}, "", true};
}

} // namespace

VerbCall call_of(const std::string& name, const std::string& text, const std::string& folder) {
    const JsonObject body = JsonObject::parse(text, "the request");
    if (name == "show") return show_call(body);
    if (name == "search") return search_call(body, folder);
    if (name == "plan") return plan_call(body, folder);
    if (name == "import") return import_call(body, folder);
    if (name == "launch") return launch_call(body, folder);
    refuse("{}: no such request: show, search, plan, import or launch", name);
}

} // namespace moe::tools::ui
