// A CUDA engine whose functions throw, or pass on what the program throws: it is caught on the other side of the door.
#include "engine/backends/cuda/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/gpu_properties.hpp"

#include <exception>
#include <stdexcept>
#include <utility>

namespace moe::backends {

namespace {

int counted = 0;
bool asked = false;

// A runtime counts exceptions for those who unwind: this destructor runs while one is on its way.
struct Unwound {
    ~Unwound() { counted = std::uncaught_exceptions(); }
};

int again() {
    try {
        const Unwound unwound;
        throw std::runtime_error("a kernel's limit");
    } catch (...) {
        throw;
    }
}

// Its queue passes on what the program's own functions throw, as the capture of a graph does.
class Passing : public device::Queue {
public:
    void* stream(int) const override { return nullptr; }
    bool replays() const override { return true; }
    void reserve(std::size_t, std::size_t) override {}
    void prepare(bool, const std::function<void()>& enqueue) override {
        try {
            const Unwound unwound;
            enqueue();
        } catch (...) {
            throw;
        }
    }
    void play(bool, const std::function<void()>&) override {}
    void forget() override {}
    void rehearse(const std::function<void()>& enqueue) override {
        const Unwound unwound;
        enqueue();
    }
    void fork(int) override {}
    void join(int) override {}
    void signal(std::size_t, int) override {}
    void await(std::size_t, int) override {}
    void stamp(std::size_t, int) override {}
    double seconds(std::size_t) override { return 0.0; }
    void mark(int, int) override {}
    int marked(int) const override { return counted; }
    bool idle() override { return true; }
    void wait() override {}
};

class Opened : public device::Device {
public:
    std::string name() const override { return "of a module, with a name too long for the object itself"; }
    device::Queue* queue() override { return &queue_; }
    char* allocate(std::size_t) override { return nullptr; }
    void release(char*) noexcept override {}
    void fill(void*, int, std::size_t) override {}
    void write(void*, const void*, std::size_t) override {}
    void read(void*, const void*, std::size_t) override {}

private:
    Passing queue_;
};

std::unique_ptr<device::Device> opened(bool, int) { return std::make_unique<Opened>(); }

machine::GpuProperties words() { fail("exceptions on their way: {}", counted); }

} // namespace

void fill_cuda(ops::Backend& backend) {
    backend.name = "throwing";
    backend.open = opened;
    backend.devices = again;
    backend.properties = words;
    if (!std::exchange(asked, true)) refuse("--backend cuda: no CUDA device {}", 0);
}

} // namespace moe::backends
