// Copies between device memory and pinned memory by a kernel: every byte, and no byte more, whatever the size and
// place.
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/program/communicators.hpp"
#include "tests/kernels/cuda_host_copy.hpp"
#include "tests/kernels/cuda_timing.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>

namespace moe::test {
namespace {

// Memory of the device or pinned memory of the host.
class Memory {
public:
    Memory(bool host, std::size_t bytes) : host_(host) {
        CUDA_CHECK(host ? cudaMallocHost(&data_, bytes) : cudaMalloc(&data_, bytes));
    }
    ~Memory() { host_ ? cudaFreeHost(data_) : cudaFree(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* at(std::size_t offset) const { return static_cast<char*>(data_) + offset; }

private:
    bool host_;
    void* data_ = nullptr;
};

std::vector<char> numbered(std::size_t bytes, std::uint32_t seed) {
    std::vector<char> out(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
        out[i] = static_cast<char>((static_cast<std::uint32_t>(i) * 2654435761u + seed) >> 24);
    return out;
}

constexpr std::size_t margin = 64; // bytes before and behind what is copied

// Copies `bytes` from `from_offset` behind an aligned address to `to_offset` behind another one, and holds all bytes of
// the target to what the CPU's copy leaves.
void check_copy(bool to_host, std::size_t bytes, std::size_t from_offset, std::size_t to_offset, int blocks) {
    const std::string way = to_host ? "to the host, " : "from the host, ";
    INFO(way, bytes, " bytes from ", from_offset, " to ", to_offset, ", ", blocks, " blocks");
    const std::size_t size = bytes + 2 * margin;
    const Memory source(!to_host, size), target(to_host, size);
    const std::vector<char> is = numbered(size, 1);
    std::vector<char> was = numbered(size, 2), got(size);
    CUDA_CHECK(cudaMemcpy(source.at(0), is.data(), size, cudaMemcpyDefault));
    CUDA_CHECK(cudaMemcpy(target.at(0), was.data(), size, cudaMemcpyDefault));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::int64_t before = cuda_copies_by_blocks();
    cuda_copy_by_blocks(target.at(to_offset), source.at(from_offset), static_cast<std::int64_t>(bytes), blocks,
                        nullptr);
    CHECK(cuda_copies_by_blocks() == before + (bytes > 0 ? 1 : 0));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(got.data(), target.at(0), size, cudaMemcpyDefault));
    std::memcpy(was.data() + to_offset, is.data() + from_offset, bytes);
    CHECK(std::memcmp(got.data(), was.data(), size) == 0);
}

} // namespace

std::vector<HostCopy> host_copies() {
    constexpr std::size_t bytes = std::size_t{64} << 20;
    const Memory host(true, bytes), device(false, bytes);
    CUDA_CHECK(cudaMemset(device.at(0), 1, bytes));
    std::vector<HostCopy> out;
    for (const int blocks : {program::host_copy_blocks, 2 * program::host_copy_blocks})
        for (const bool to_host : {true, false}) {
            char* const to = to_host ? host.at(0) : device.at(0);
            const char* const from = to_host ? device.at(0) : host.at(0);
            out.push_back(
                {fmt::format("64 MiB {} the host by {} blocks", to_host ? "to" : "from", blocks), blocks,
                 seconds_of([&](void* stream) { cuda_copy_by_blocks(to, from, bytes, blocks, stream); }),
                 seconds_of([&](void* stream) {
                     CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
                 })});
        }
    return out;
}

TEST_CASE("copies to the host and back by a kernel move every byte and no other") {
    for (const bool to_host : {true, false}) {
        for (const std::size_t bytes : {0, 1, 15, 16, 17, 31, 16383, 16384, 16400, 16385, 65536, 400000, 900001})
            for (const std::size_t offset : {0, 1, 8, 15}) check_copy(to_host, bytes, offset, offset, 2);
        for (const std::size_t bytes : {1, 17, 20000}) // Both sides lie differently.
            check_copy(to_host, bytes, 3, 16, 4), check_copy(to_host, bytes, 8, 4, 4);
        for (const int blocks : {1, 3, 64}) check_copy(to_host, 5000003, 0, 0, blocks);
        check_copy(to_host, (std::size_t{40} << 20) + 5, 0, 0, program::host_copy_blocks);
    }
}

} // namespace moe::test
