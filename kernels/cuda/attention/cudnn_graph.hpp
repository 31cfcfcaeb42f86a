// A cuDNN operation graph, written down op by op and turned into a plan: as much of cuDNN's backend API as attention
// needs.
//
// Tensors have four dimensions [batch, heads, rows, columns] with strides in elements. The library is opened and not
// linked, so that one build runs with and without it. Errors are std::runtime_error with cuDNN's own words.
#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace moe::cuda {

// The entry points of libcudnn.so.9 that are used.
struct Cudnn {
    decltype(&cudnnGetVersion) version = nullptr;
    decltype(&cudnnCreate) create = nullptr;
    decltype(&cudnnSetStream) set_stream = nullptr;
    decltype(&cudnnGetErrorString) words = nullptr;
    decltype(&cudnnGetLastErrorString) last_words = nullptr;
    decltype(&cudnnBackendCreateDescriptor) make = nullptr;
    decltype(&cudnnBackendDestroyDescriptor) destroy = nullptr;
    decltype(&cudnnBackendSetAttribute) set = nullptr;
    decltype(&cudnnBackendGetAttribute) get = nullptr;
    decltype(&cudnnBackendFinalize) finalize = nullptr;
    decltype(&cudnnBackendExecute) execute = nullptr;

    // Opens the library, 9.10 or later; false with the reason in `why`.
    bool open(std::string& why);
    void check(cudnnStatus_t status, const char* what) const;
};

// A backend descriptor with its life.
class CudnnDescriptor {
public:
    CudnnDescriptor() = default;
    CudnnDescriptor(const Cudnn& library, cudnnBackendDescriptorType_t type);
    ~CudnnDescriptor();
    CudnnDescriptor(CudnnDescriptor&& other) noexcept { swap(other); }
    CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
        swap(other);
        return *this;
    }

    cudnnBackendDescriptor_t raw() const { return raw_; }
    void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count, const void* data);
    template <class Value>
    void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
        set(name, type, 1, &value);
    }
    void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
        set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.raw_);
    }
    void finalize();
    bool try_finalize();

private:
    void swap(CudnnDescriptor& other) noexcept {
        std::swap(library_, other.library_);
        std::swap(raw_, other.raw_);
    }
    const Cudnn* library_ = nullptr;
    cudnnBackendDescriptor_t raw_ = nullptr;
};

// A tensor of a graph; a default one stands for "none".
struct CudnnTensor {
    const CudnnDescriptor* descriptor = nullptr;
    std::array<std::int64_t, 4> dims{}, strides{};
};

class CudnnGraph {
public:
    using Tensor = CudnnTensor;
    using Sizes = std::array<std::int64_t, 4>;

    explicit CudnnGraph(const Cudnn& library) : library_(&library) {}

    // Memory that run() is given under this id, aligned to 16 bytes.
    Tensor operand(std::int64_t id, cudnnDataType_t type, const Sizes& dims, const Sizes& strides);
    // A number that lies on the host and is part of the graph.
    Tensor scalar(float value);
    Tensor scalar(std::int32_t value);
    // Between two ops; dense, the last dimension fastest, or with strides of its own.
    Tensor inner(cudnnDataType_t type, const Sizes& dims);
    Tensor inner_as(cudnnDataType_t type, const Sizes& dims, const Sizes& strides);

    void matmul(const Tensor& a, const Tensor& b, const Tensor& c);
    // y = op(x, b), or t ? x : b; FP32 arithmetic unless stated.
    void pointwise(cudnnPointwiseMode_t mode, const Tensor& x, const Tensor& b, const Tensor& t, const Tensor& y,
                   cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT);
    // Number of each element along an axis, as int32 of x's shape.
    Tensor index(const Tensor& x, std::int64_t axis);
    // Reduces over the dimensions in which y is shorter than x.
    void reduce(cudnnReduceTensorOp_t op, const Tensor& x, const Tensor& y);
    // y holds x's elements in the order that y's strides say.
    void view(const Tensor& x, const Tensor& y);

    // The op that yields a new inner tensor of x's shape.
    Tensor apply(cudnnPointwiseMode_t mode, const Tensor& x, const Tensor& b = {},
                 cudnnDataType_t type = CUDNN_DATA_FLOAT, cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT);

    // Chooses an engine for a device (a CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR); false where cuDNN has none for the graph.
    bool plan(const CudnnDescriptor& device);
    std::int64_t workspace_bytes() const { return workspace_bytes_; }
    // Enqueues the plan on the handle's stream; pairs of id and address for every operand.
    void run(cudnnHandle_t handle, const std::vector<std::pair<std::int64_t, void*>>& operands, void* workspace) const;

private:
    Tensor add(CudnnDescriptor tensor, cudnnDataType_t type, const Sizes& dims, const Sizes& strides, std::int64_t id);
    Tensor number(cudnnDataType_t type, const void* value);
    CudnnDescriptor made(cudnnBackendDescriptorType_t type) const { return {*library_, type}; }
    void add_op(CudnnDescriptor op);

    const Cudnn* library_;
    std::deque<CudnnDescriptor> parts_; // A deque leaves parts in place: tensors point to them.
    std::vector<cudnnBackendDescriptor_t> ops_;
    struct Number {
        std::int64_t id;
        std::array<unsigned char, 4> bytes;
    };
    std::deque<Number> numbers_;
    std::int64_t last_id_ = 1000; // operands' ids are below
    CudnnDescriptor plan_;
    std::int64_t workspace_bytes_ = 0;
};

} // namespace moe::cuda
