// A property of every document that is read: any field replaced by any hostile value is accepted, or refused as bad
// input in one line that names file and field.
#include "engine/base/crc32c.hpp"
#include "engine/data/text/tokenizer.hpp"
#include "engine/weights/checkpoint.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/machine/coefficients.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/anchored.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/interval.hpp"
#include "simulator/published/neighbours.hpp"
#include "simulator/published/ratios.hpp"
#include "simulator/routing/routing.hpp"
#include "tests/engine/data/made_tokenizer.hpp"
#include "tests/engine/weights/made_snapshot.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/published_plan.hpp"
#include "tools/engines/engine_table.hpp"
#include "tools/import/reader_table.hpp"
#include "tools/measured/kernel_table.hpp"
#include "tools/measured/log_format.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

using namespace moe;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

const std::vector<std::string>& hostile_values() {
    static const std::vector<std::string> values{"null",
                                                 "true",
                                                 "\"\"",
                                                 "\"x\"",
                                                 "\"a\\u001b[31m\\nb\"",
                                                 "\"" + std::string(100'000, 'y') + "\"",
                                                 "-1",
                                                 "0",
                                                 "1",
                                                 "0.5",
                                                 "-0.5",
                                                 "1e308",
                                                 "-1e308",
                                                 "NaN",
                                                 "Infinity",
                                                 "2147483648",
                                                 "9223372036854775808",
                                                 "36893488147419103232",
                                                 "[]",
                                                 "{}",
                                                 "[null]",
                                                 "{\"\": [[[{}]]]}",
                                                 std::string(90, '[') + std::string(90, ']')};
    return values;
}

struct Document {
    std::string file; // as messages name it
    Json json;
    std::function<void(const std::string& text)> read;
};

using Path = std::vector<std::string>; // of names of fields; "0" is an array's first element

// Every field and container, of arrays the first element.
void collect(const Json& json, const Path& at, std::vector<Path>& found) {
    if (!at.empty()) found.push_back(at);
    if (json.is_object())
        for (const auto& [key, value] : json.items()) {
            Path next = at;
            next.push_back(key);
            collect(value, next, found);
        }
    if (json.is_array() && !json.empty()) {
        Path next = at;
        next.emplace_back("0");
        collect(json[0], next, found);
    }
}

std::string with(Json json, const Path& path, const std::string& value) {
    const std::string mark = "@hostile@";
    Json* at = &json;
    for (const std::string& step : path) at = at->is_array() ? &(*at)[0] : &(*at)[step];
    *at = mark;
    std::string text = json.dump();
    return text.replace(text.find("\"" + mark + "\""), mark.size() + 2, value);
}

// The name of a field of the path stands in the message; of a list's elements, that of the list.
bool names_field(const std::string& message, const Path& path) {
    if (path == Path{"0"}) return message.find("row 1") != std::string::npos; // of a document that is a list
    for (auto step = path.rbegin(); step != path.rend(); ++step)
        if (*step != "0" && message.find(*step) != std::string::npos) return true;
    return false;
}

bool one_line(const std::string& message) {
    constexpr std::size_t longest = 1000;
    bool plain = message.size() <= longest;
    for (const char letter : message) plain = plain && static_cast<unsigned char>(letter) >= 0x20;
    return plain;
}

// What a message lacks, "" where it lacks nothing or the value is accepted.
std::string complaint(const Document& document, const Path& path, const std::string& value) {
    try {
        document.read(with(document.json, path, value));
    } catch (const Error& error) {
        const std::string message = error.what();
        if (error.fault() == Fault::failure) return "a failure: " + message;
        if (message.starts_with("hardware h100: stack ")) return {}; // a requirement that this machine does not meet
        if (message.find(document.file) == std::string::npos) return "does not name the file: " + message;
        // Fields may contradict each other, and the message then names the other one.
        bool named = names_field(message, path);
        for (const auto& [key, other] : document.json.items()) named = named || message.find(key) != std::string::npos;
        if (!named) return "does not name the field: " + message;
        if (!one_line(message)) return "is no short line: " + message.substr(0, 300);
    } catch (const std::exception& error) {
        return std::string("raw exception: ") + error.what();
    }
    return {};
}

void check(const Document& document) {
    REQUIRE_NOTHROW(document.read(document.json.dump()));
    std::vector<Path> paths;
    collect(document.json, {}, paths);
    REQUIRE(!paths.empty());
    int shown = 0;
    for (const Path& path : thinned(paths))
        for (const std::string& value : hostile_values()) {
            const std::string wrong = complaint(document, path, value);
            if (wrong.empty() || ++shown > 5) continue;
            std::string field;
            for (const std::string& step : path) field += "/" + step;
            FAIL_CHECK(document.file << ": " << field << " = " << value.substr(0, 40) << ": " << wrong);
        }
    CHECK(shown == 0);
}

std::string profiles_file(const std::string& name) { return read_file(profiles_folder() + "/" + name); }

Document model_document(const std::string& name) {
    return {"hostile.json", Json::parse(profiles_file("models/" + name + ".json")), [](const std::string& text) {
                const model::Model model = families::model_from_json(text, "hostile.json");
                CHECK(model::count_parameters(model).total >= 0);
                CHECK(model::model_flops_per_token(model, 4096) >= 0.0);
            }};
}

void write_plainly(const std::string& path, const std::string& text) { // without waiting for the disk
    std::FILE* file = std::fopen(path.c_str(), "wb");
    REQUIRE(file != nullptr);
    REQUIRE(std::fwrite(text.data(), 1, text.size(), file) == text.size());
    REQUIRE(std::fclose(file) == 0);
}

// A copy of the profiles whose files may be written; readers that know names alone find them there.
class Profiles {
public:
    Profiles() : before_(profiles_folder()) {
        fs::copy(before_, folder_.path, fs::copy_options::recursive);
        ::setenv("MOE_PLAN_PROFILES", folder_.path.c_str(), 1);
    }
    Profiles(const Profiles&) = delete;
    Profiles& operator=(const Profiles&) = delete;
    ~Profiles() { ::setenv("MOE_PLAN_PROFILES", before_.c_str(), 1); }

    Document document(const std::string& file, const std::function<void()>& read) const {
        const std::string path = folder_ / file;
        return {fs::path(file).filename().string(), Json::parse(read_file(path)),
                [path, read](const std::string& text) {
                    write_plainly(path, text);
                    read();
                }};
    }
    void restore(const std::string& file) const { write_plainly(folder_ / file, read_file(before_ + "/" + file)); }

private:
    ::Folder folder_;
    std::string before_;
};

} // namespace

TEST_CASE("hostile fields: models") {
    for (const char* name :
         {"DeepSeek-V3", "DeepSeek-V3.2", "GPT-OSS-20B", "Llama4-Scout", "Mixtral-8x7B", "Nemotron-3-Nano",
          "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "GPT3-175B", "Grok-1", "DeepSeek-V4-Flash"})
        check(model_document(name));
}

TEST_CASE("hostile fields: machines") {
    Json small = Json::parse(profiles_file("hardware/h100-measured.json"));
    for (const char* list : {"measured", "product_tiles"})
        if (small.contains(list))
            while (small[list].size() > 2) small[list].erase(std::prev(small[list].end()));
    if (small.contains("product_tiles"))
        for (const auto& [family, rows] : small["product_tiles"].items())
            if (!small["measured"].contains(family))
                small["measured"][family] = Json::array({Json::array({1e12, 1e-3})});
    small.erase("measured_clocks");
    small["cards"] = Json::array();
    for (const char* card : {"one", "another"})
        small["cards"].push_back({{"measured_by", card}, {"factors", {{small["measured"].begin().key(), 1.01}}}});
    for (const Json& json : {small, Json::parse(profiles_file("hardware/cpu-local.json")),
                             Json::parse(profiles_file("hardware/rtx-5090.json"))})
        check(
            {"hostile.json", json, [](const std::string& text) { machine::hardware_from_json(text, "hostile.json"); }});
}

TEST_CASE("hostile fields: plans") {
    plan::Plan plan = published_plan("tiny-qwen3-moe", "cpu-local", "moe-plan", 64);
    plan.gpus = plan.dp = plan.edp = 8;
    plan.gbs = 16;
    check({"hostile.json", Json::parse(plan::plan_to_json(plan)),
           [](const std::string& text) { plan::plan_from_json(text, "hostile.json"); }});
}

TEST_CASE("hostile fields: what was measured and fitted") {
    const auto rows = [](const std::string& file) { return Json(Json::array({Json::parse(profiles_file(file))[0]})); };
    check({"hostile.json", rows("runs/residuals.json"),
           [](const std::string& text) { published::residuals_from_json(text, "hostile.json"); }});
    check({"hostile.json", rows("runs/ratios.json"),
           [](const std::string& text) { published::ratio_errors_from_json(text, "hostile.json"); }});
    check({"hostile.json", Json::parse(profiles_file("runs/neighbours.json")),
           [](const std::string& text) { published::neighbour_model_from_json(text, "hostile.json"); }});
    const ::Folder folder;
    const auto by_file = [&folder](const std::function<void(const std::string&)>& load) {
        const std::string path = folder / "hostile.json";
        return [path, load](const std::string& text) {
            write_file(path, text);
            load(path);
        };
    };
    check({"hostile.json", Json::parse(R"({"counts": [[3, 4, 5], [1, 2, 0.5]]})"),
           by_file([](const std::string& path) { routing::load_histogram(path); })});
    check({"hostile.json",
           Json::parse(R"({"schema": "moe-plan/anchored-stack/1", "base": "bridge-26.06", "source": "a test",
        "coefficients": {"gemm": 0.7}, "runs": [{"run_id": "r", "model": "m", "family": "f", "hardware": "h100",
        "generation": "hopper", "precision": "bf16", "stack": "s", "software": "w", "gpus": 8, "seq": 4096,
        "log_error": 0.1, "noise": 0.05}]})"),
           by_file([](const std::string& path) { stack::load_anchored(path); })});
}

// Under the checksum that the content has.
TEST_CASE("hostile fields: the index of a checkpoint") {
    const ::Folder folder;
    weights::write_checkpoint(folder / "c", made_snapshot(3, "-x"));
    const std::string path = folder / "c/step-00000003", index = path + "/index.json";
    check({"step-00000003", load_json<Json>(index).at("checkpoint"), [&](const std::string& text) {
               const std::string content = json_text(parse_json<Json>(text, index));
               write_plainly(index,
                             fmt::format(R"({{"crc32c":{},"checkpoint":{}}})", engine::crc32c(content), content));
               weights::StoredCheckpoint{path};
           }});
}

TEST_CASE("hostile fields: the header of a safetensors file") {
    const ::Folder folder;
    const std::string path = folder / "hostile.safetensors";
    const Json header = Json::parse(R"({"__metadata__": {"format": "pt"},
        "one": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "other": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}})");
    check({"hostile.safetensors", header, [&](const std::string& text) {
               const std::uint64_t length = text.size();
               std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
               write_plainly(path, bytes + text + std::string(32, '\1'));
               const weights::Safetensors file(path);
               for (const auto& [name, tensor] : file.tensors()) {
                   std::vector<float> values(static_cast<std::size_t>(tensor.elements));
                   weights::read_floats(tensor, name, 0, values);
               }
           }});
}

// The 256 tokens of bytes are set when the text is read: replacing each of them would say nothing more.
TEST_CASE("hostile fields: a tokenizer.json") {
    if (no_icu()) return;
    const ::Folder folder;
    const std::string path = folder / "hostile.json";
    Json tokenizer = made_by_hand();
    Json bytes = Json::object();
    for (const auto& [token, id] : tokenizer["model"]["vocab"].items())
        if (id < 256) bytes[token] = id;
    for (const auto& [token, id] : bytes.items()) tokenizer["model"]["vocab"].erase(token);
    const std::string first = "\"vocab\":{", alphabet = bytes.dump();
    check({"hostile.json", tokenizer, [&](const std::string& text) {
               std::string whole = text;
               if (const std::size_t at = whole.find(first + "\""); at != std::string::npos)
                   whole.insert(at + first.size(), alphabet.substr(1, alphabet.size() - 2) + ",");
               write_plainly(path, whole);
               data::Tokenizer::Known known;
               std::vector<std::int32_t> ids;
               data::Tokenizer(path).encode("hello lo w", 10, {"hostile.json", 0}, known, ids);
           }});
}

TEST_CASE("hostile fields: stacks, rules, coefficients and the tables of other tools") {
    const Profiles profiles;
    const machine::Hardware h100 = machine::load_hardware("h100");
    const auto held = [&](const std::string& file, const std::function<void()>& read) {
        check(profiles.document(file, read));
        profiles.restore(file);
    };
    held("stacks/moe-plan.json", [&] { stack::load_stack("moe-plan", h100); });
    held("stacks/bridge-26.06.json", [&] { stack::load_stack("bridge-26.06", h100); });
    held("coefficients.json", [] { machine::load_coefficients(); });
    held("logs/megatron-lm.json", [] { tools::load_log_formats(); });
    held("engines/megatron-core.json", [] { tools::load_engine_table("megatron-core"); });
    held("engines/readers/torchtitan.json", [] { tools::load_reader_table("torchtitan"); });
    held("kernels/megatron.json", [] { tools::load_kernel_table("megatron"); });
}
