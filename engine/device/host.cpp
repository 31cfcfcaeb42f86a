// The device that is this process itself.
#include "engine/device/device.hpp"

#include <cstring>
#include <new>

namespace moe::device {

namespace {

constexpr std::align_val_t alignment{256};

class Host : public Device {
public:
    std::string name() const override { return "this machine's memory"; }
    char* allocate(std::size_t bytes) override {
        return static_cast<char*>(::operator new(bytes, alignment, std::nothrow));
    }
    void release(char* memory) noexcept override { ::operator delete(memory, alignment); }
    void fill(void* target, int byte, std::size_t bytes) override { std::memset(target, byte, bytes); }
    void write(void* target, const void* source, std::size_t bytes) override { std::memcpy(target, source, bytes); }
    void read(void* target, const void* source, std::size_t bytes) override { std::memcpy(target, source, bytes); }
};

} // namespace

std::unique_ptr<Device> open_host() { return std::make_unique<Host>(); }

} // namespace moe::device
