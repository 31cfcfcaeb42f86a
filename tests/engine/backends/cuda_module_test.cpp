// The CUDA engine's module as programs open it, without a GPU: modules that are not there, no modules, of another
// build, and one whose functions throw.
#include "engine/backends/cuda_module.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/gpu_properties.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <exception>
#include <fstream>

using namespace moe;

namespace {

// Of tests/engine/backends/meson.build.
std::string module_of_tests(const std::string& name) {
    const char* folder = std::getenv("CUDA_MODULES");
    REQUIRE_MESSAGE(folder != nullptr, "CUDA_MODULES is not set: run this through meson test");
    return std::string(folder) + "/" + name + ".so";
}

std::string refusal(const std::vector<std::string>& places) {
    try {
        backends::open_cuda_module(places);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        std::string text = error.what();
        CHECK(text.find('\n') == std::string::npos);
        CHECK(text.find("--backend cuda: ") == 0);
        return text;
    }
    FAIL("it was opened");
    return {};
}

void check_has(const std::string& text, const std::string& words) {
    CHECK_MESSAGE(text.find(words) != std::string::npos, text, " does not say ", words);
}

} // namespace

TEST_CASE("the CUDA engine's module: one that is missing is named with its places") {
    check_has(refusal({"/nowhere/moe-plan-cuda.so", "/nor/here.so"}),
              "no CUDA engine at /nowhere/moe-plan-cuda.so or /nor/here.so: it is built where nvcc is found, with "
              "-Dcuda=enabled; use --backend cpu");
}

TEST_CASE("the CUDA engine's module: a file that is none is refused") {
    const Folder folder;
    std::ofstream(folder / "text.so") << "words\n";
    check_has(refusal({folder / "text.so"}), "text.so");
}

TEST_CASE("the CUDA engine's module: one of another build is refused by the names of both") {
    const std::string text = refusal({"/nowhere.so", module_of_tests("other_build")});
    check_has(text, "other_build.so is of another build (0.0.1 gcc-4.9 feed; this is " +
                        std::string(backends::build_stamp()) + "): take both from one build");
}

TEST_CASE("the CUDA engine's module: places") {
    const char* before = std::getenv("MOE_PLAN_CUDA");
    const std::string kept = before == nullptr ? "" : before;
    ::setenv("MOE_PLAN_CUDA", "/a/b.so", 1);
    CHECK(backends::cuda_module_places() == std::vector<std::string>{"/a/b.so"});
    ::setenv("MOE_PLAN_CUDA", "", 1);
    const std::vector<std::string> places = backends::cuda_module_places();
    REQUIRE(places.size() == 2);
    const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    CHECK(places[0] == (here / "moe-plan-cuda.so").string());
    check_has(places[1], "/moe-plan/moe-plan-cuda.so");
    CHECK(places[1].find("..") == std::string::npos);
    if (before != nullptr) ::setenv("MOE_PLAN_CUDA", kept.c_str(), 1);
}

TEST_CASE("the CUDA engine's module: what it throws is caught here, and counted once") {
    const backends::CudaEngine fill = backends::open_cuda_module({module_of_tests("throwing")});
    const backends::CudaHost host = backends::cuda_host();
    ops::Backend backend;
    CHECK_THROWS_WITH_AS(fill(host, backend), "--backend cuda: no CUDA device 0", Error);
    CHECK(std::uncaught_exceptions() == 0);
    fill(host, backend);
    CHECK(backend.name == std::string("throwing"));
    for (int time = 0; time < 2; ++time) {
        CHECK_THROWS_WITH_AS(backend.devices(), "a kernel's limit", std::runtime_error);
        CHECK(std::uncaught_exceptions() == 0);
        CHECK_THROWS_WITH_AS(backend.properties(), "exceptions on their way: 1", Error);
        CHECK(std::uncaught_exceptions() == 0);
    }

    // The program's own, through frames of the module that catch and that only unwind.
    const std::unique_ptr<device::Device> device = backend.open(false, 0);
    CHECK(device->name().ends_with("for the object itself"));
    device::Queue& queue = *device->queue();
    const std::function<void()> enqueue = [] { fail("rank {}: an op", 3); };
    CHECK_THROWS_WITH_AS(queue.prepare(false, enqueue), "rank 3: an op", Error);
    CHECK(queue.marked(0) == 1);
    CHECK_THROWS_WITH_AS(queue.rehearse(enqueue), "rank 3: an op", Error);
    CHECK(std::uncaught_exceptions() == 0);
}
