// The Python module moe_plan._core: a command line run in the interpreter's process, without its lock.
#include "tools/cli/run.hpp"
#include "tools/print/listener.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using namespace moe;
using namespace moe::tools;

struct Stopped {}; // thrown through a verb whose caller has raised an exception

// Exit status of the command, its document or else its error line, and the warnings.
using Outcome = std::tuple<int, std::string, std::vector<std::string>>;

// A verb on a thread of its own. The caller's thread waits, calls back with progress, and looks for signals, which
// Python hands to the main thread alone.
class Call : public Listener {
public:
    Call(std::vector<std::string> words, nb::object progress)
        : words_(std::move(words)), callback_(std::move(progress)) {}

    Outcome run() {
        std::exception_ptr raised;
        {
            const nb::gil_scoped_release released;
            std::thread verb([this] { carry_out(); });
            while (!raised && wait()) raised = call_back();
            if (raised) stop();
            verb.join();
        }
        if (raised) std::rethrow_exception(raised);
        return outcome_;
    }

    void printed(std::string_view text) override { std::get<1>(outcome_) += text; }
    void noted(std::string_view line) override { std::get<2>(outcome_).emplace_back(line); }
    void progress(std::string_view line) override {
        const std::lock_guard lock(mutex_);
        if (stopped_) throw Stopped{};
        line_ = line;
        changed_.notify_one();
    }

private:
    void carry_out() {
        const Listening listening(*this);
        try {
            run_command(std::move(words_));
        } catch (const Error& error) {
            end(error.fault(), error.what());
        } catch (const std::bad_alloc&) {
            end(Fault::failure, "out of memory");
        } catch (const std::exception& error) {
            end(Fault::failure, error.what());
        } catch (const Stopped&) {
        }
        const std::lock_guard lock(mutex_);
        done_ = true;
        changed_.notify_one();
    }

    void end(Fault fault, const std::string& line) {
        std::get<0>(outcome_) = static_cast<int>(fault);
        std::get<1>(outcome_) = line;
    }

    // Returns false once the verb has ended.
    bool wait() {
        constexpr std::chrono::milliseconds between_signals(50);
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, between_signals, [this] { return done_ || line_.has_value(); });
        return !done_;
    }

    // What the callback or a signal's handler has raised.
    std::exception_ptr call_back() {
        std::optional<std::string> line;
        {
            const std::lock_guard lock(mutex_);
            line = std::exchange(line_, std::nullopt);
        }
        const nb::gil_scoped_acquire acquired;
        try {
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (line && !callback_.is_none()) callback_(*line);
        } catch (...) {
            return std::current_exception();
        }
        return nullptr;
    }

    void stop() {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
    }

    std::vector<std::string> words_;
    nb::object callback_;
    Outcome outcome_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::optional<std::string> line_; // the latest, until it was called back with
    bool done_ = false, stopped_ = false;
};

Outcome run(std::vector<std::string> words, nb::object progress) {
    return Call(std::move(words), std::move(progress)).run();
}

int run_as_command(std::vector<std::string> words) {
    const nb::gil_scoped_release released;
    return run_to_status(std::move(words));
}

} // namespace

NB_MODULE(_core, module) {
    module.def("run", &run, nb::arg("words"), nb::arg("progress").none(),
               "Runs a command line. Returns its exit status, what it prints or its error line, and its warnings.");
    module.def("main", &run_as_command, nb::arg("words"),
               "Runs a command line on the standard streams. Returns its exit status.");
}
