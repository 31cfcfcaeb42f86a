// cuDNN graphs: descriptors, the ops of attention, the choice of an engine and its run.
#include "kernels/cuda/attention/cudnn_graph.hpp"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace moe::cuda {

bool Cudnn::open(std::string& why) {
    void* file = nullptr;
    for (const char* name :
         {"libcudnn.so.9", "/usr/local/cuda/lib64/libcudnn.so.9", "/usr/local/cuda/lib/libcudnn.so.9"})
        if (file == nullptr) file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) {
        why = "libcudnn.so.9 was not found (set LD_LIBRARY_PATH to its folder)";
        return false;
    }
    bool complete = true;
    const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, name));
        complete = complete && function != nullptr;
    };
    find(version, "cudnnGetVersion");
    find(create, "cudnnCreate");
    find(set_stream, "cudnnSetStream");
    find(words, "cudnnGetErrorString");
    find(last_words, "cudnnGetLastErrorString");
    find(make, "cudnnBackendCreateDescriptor");
    find(destroy, "cudnnBackendDestroyDescriptor");
    find(set, "cudnnBackendSetAttribute");
    find(get, "cudnnBackendGetAttribute");
    find(finalize, "cudnnBackendFinalize");
    find(execute, "cudnnBackendExecute");
    // Masks of -infinity are from 9.10 on (before, the lowest number stood for it).
    if (!complete || version() < 91000) {
        why = "libcudnn.so.9 is older than 9.10";
        return false;
    }
    return true;
}

void Cudnn::check(cudnnStatus_t status, const char* what) const {
    if (status == CUDNN_STATUS_SUCCESS) return;
    char last[256] = "";
    last_words(last, sizeof last);
    throw std::runtime_error(std::string("cuDNN: ") + what + ": " + words(status) + " " + last);
}

CudnnDescriptor::CudnnDescriptor(const Cudnn& library, cudnnBackendDescriptorType_t type) : library_(&library) {
    library.check(library.make(type, &raw_), "making a descriptor");
}

CudnnDescriptor::~CudnnDescriptor() {
    if (raw_ != nullptr) library_->destroy(raw_);
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                          const void* data) {
    library_->check(library_->set(raw_, name, type, count, data), "describing an operation graph");
}

void CudnnDescriptor::finalize() { library_->check(library_->finalize(raw_), "completing a descriptor"); }
bool CudnnDescriptor::try_finalize() { return library_->finalize(raw_) == CUDNN_STATUS_SUCCESS; }

CudnnGraph::Tensor CudnnGraph::add(CudnnDescriptor tensor, cudnnDataType_t type, const Sizes& dims,
                                   const Sizes& strides, std::int64_t id) {
    constexpr std::int64_t alignment = 16, rank = std::tuple_size_v<Sizes>;
    tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, rank, dims.data());
    tensor.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, rank, strides.data());
    tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
    tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment);
    tensor.finalize();
    parts_.push_back(std::move(tensor));
    return {&parts_.back(), dims, strides};
}

CudnnGraph::Tensor CudnnGraph::operand(std::int64_t id, cudnnDataType_t type, const Sizes& dims, const Sizes& strides) {
    return add(made(CUDNN_BACKEND_TENSOR_DESCRIPTOR), type, dims, strides, id);
}

CudnnGraph::Tensor CudnnGraph::inner(cudnnDataType_t type, const Sizes& d) {
    return inner_as(type, d, {d[1] * d[2] * d[3], d[2] * d[3], d[3], 1});
}

CudnnGraph::Tensor CudnnGraph::inner_as(cudnnDataType_t type, const Sizes& dims, const Sizes& strides) {
    CudnnDescriptor tensor = made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
    return add(std::move(tensor), type, dims, strides, ++last_id_);
}

CudnnGraph::Tensor CudnnGraph::number(cudnnDataType_t type, const void* value) {
    CudnnDescriptor tensor = made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, true);
    numbers_.push_back({++last_id_, {}});
    std::memcpy(numbers_.back().bytes.data(), value, numbers_.back().bytes.size());
    return add(std::move(tensor), type, {1, 1, 1, 1}, {1, 1, 1, 1}, last_id_);
}

CudnnGraph::Tensor CudnnGraph::scalar(float value) { return number(CUDNN_DATA_FLOAT, &value); }
CudnnGraph::Tensor CudnnGraph::scalar(std::int32_t value) { return number(CUDNN_DATA_INT32, &value); }

void CudnnGraph::add_op(CudnnDescriptor op) {
    op.finalize();
    ops_.push_back(op.raw());
    parts_.push_back(std::move(op));
}

void CudnnGraph::matmul(const Tensor& a, const Tensor& b, const Tensor& c) {
    CudnnDescriptor rule = made(CUDNN_BACKEND_MATMUL_DESCRIPTOR), op = made(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    rule.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    rule.finalize();
    op.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a.descriptor);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b.descriptor);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *c.descriptor);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, rule);
    parts_.push_back(std::move(rule));
    add_op(std::move(op));
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, const Tensor& x, const Tensor& b, const Tensor& t,
                           const Tensor& y, cudnnDataType_t arithmetic) {
    CudnnDescriptor rule = made(CUDNN_BACKEND_POINTWISE_DESCRIPTOR),
                    op = made(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    rule.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    rule.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, arithmetic);
    rule.finalize();
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, rule);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
    if (b.descriptor != nullptr) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b.descriptor);
    if (t.descriptor != nullptr) op.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *t.descriptor);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor);
    parts_.push_back(std::move(rule));
    add_op(std::move(op));
}

CudnnGraph::Tensor CudnnGraph::index(const Tensor& x, std::int64_t axis) {
    CudnnDescriptor rule = made(CUDNN_BACKEND_POINTWISE_DESCRIPTOR),
                    op = made(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    rule.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, CUDNN_POINTWISE_GEN_INDEX);
    rule.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    rule.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    rule.finalize();
    const Tensor y = inner(CUDNN_DATA_INT32, x.dims);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, rule);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x.descriptor);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *y.descriptor);
    parts_.push_back(std::move(rule));
    add_op(std::move(op));
    return y;
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t kind, const Tensor& x, const Tensor& y) {
    CudnnDescriptor rule = made(CUDNN_BACKEND_REDUCTION_DESCRIPTOR),
                    op = made(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    rule.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, kind);
    rule.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    rule.finalize();
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x.descriptor);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *y.descriptor);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, rule);
    parts_.push_back(std::move(rule));
    add_op(std::move(op));
}

void CudnnGraph::view(const Tensor& x, const Tensor& y) {
    CudnnDescriptor op = made(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x.descriptor);
    op.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *y.descriptor);
    add_op(std::move(op));
}

CudnnGraph::Tensor CudnnGraph::apply(cudnnPointwiseMode_t mode, const Tensor& x, const Tensor& b, cudnnDataType_t type,
                                     cudnnDataType_t arithmetic) {
    const Tensor y = inner(type, x.dims);
    pointwise(mode, x, b, {}, y, arithmetic);
    return y;
}

bool CudnnGraph::plan(const CudnnDescriptor& device) {
    CudnnDescriptor graph = made(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<std::int64_t>(ops_.size()),
              ops_.data());
    if (!graph.try_finalize()) return false;
    CudnnDescriptor choice = made(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    choice.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    choice.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    choice.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    if (!choice.try_finalize()) return false;
    std::int64_t count = 0;
    const auto ask = [&](std::int64_t most, cudnnBackendDescriptor_t* into) {
        library_->check(library_->get(choice.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, most,
                                      &count, into),
                        "asking for engines");
    };
    ask(0, nullptr);
    std::vector<CudnnDescriptor> configs;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (std::int64_t i = 0; i < count; ++i) {
        configs.push_back(made(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        raw.push_back(configs.back().raw());
    }
    ask(count, raw.data());
    parts_.push_back(std::move(graph));
    for (std::int64_t i = 0; i < count; ++i) { // The engines come best first.
        CudnnDescriptor& config = configs[static_cast<std::size_t>(i)];
        CudnnDescriptor plan = made(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
        if (!plan.try_finalize()) continue;
        std::int64_t values = 0;
        library_->check(library_->get(plan.raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                      &values, &workspace_bytes_),
                        "asking for a workspace");
        parts_.push_back(std::move(config));
        plan_ = std::move(plan);
        return true;
    }
    return false;
}

void CudnnGraph::run(cudnnHandle_t handle, const std::vector<std::pair<std::int64_t, void*>>& operands,
                     void* workspace) const {
    std::vector<std::int64_t> ids;
    std::vector<const void*> addresses;
    for (const auto& [id, address] : operands) ids.push_back(id), addresses.push_back(address);
    for (const Number& n : numbers_) ids.push_back(n.id), addresses.push_back(n.bytes.data());
    CudnnDescriptor pack = made(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    const auto count = static_cast<std::int64_t>(ids.size());
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data());
    pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, addresses.data());
    pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
    pack.finalize();
    library_->check(library_->execute(handle, plan_.raw(), pack.raw()), "running a plan");
}

} // namespace moe::cuda
