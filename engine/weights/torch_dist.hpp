// A checkpoint of torch.distributed.checkpoint, as Megatron-Core's format torch_dist writes it.
#pragma once

#include "engine/base/source_file.hpp"
#include "engine/weights/safetensors.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace moe::weights {

// A tensor of which parts lie in files.
struct DistTensor {
    struct Part {
        std::vector<std::int64_t> offsets, sizes; // of each axis
        std::string file;                         // its name in the folder
        std::size_t offset = 0, length = 0;       // bytes of its archive there
        StoredTensor tensor;                      // set by TorchDist::open
    };
    std::vector<std::int64_t> shape;
    std::vector<Part> parts; // by offsets
    std::int64_t elements() const;
};

// FOLDER/.metadata, a pickle that is read as data, lists tensors and the places of their parts in FOLDER/*.distcp.
// Source: torch/distributed/checkpoint, metadata.py and filesystem.py of PyTorch 2.15.
class TorchDist {
public:
    // Reads the list; throws Error (bad_input) naming file and tensor where it is damaged, where a part is listed
    // without a place, or where the folder has another format (zarr).
    explicit TorchDist(const std::string& folder);

    const std::string& folder() const { return folder_; }
    const std::map<std::string, DistTensor>& tensors() const { return tensors_; }
    // Opens a tensor's parts. Throws Error (bad_input) naming file and tensor where parts overlap, leave holes or are
    // missing, or are not what the list says.
    const DistTensor& open(const std::string& name);
    // Elements [first, first + out.size()) of an open tensor, row by row. For several threads at once.
    void read_floats(const std::string& name, std::int64_t first, std::span<float> out) const;

private:
    void check_parts(const std::string& name, const DistTensor& tensor) const;

    std::string folder_;
    std::map<std::string, DistTensor> tensors_;
    std::map<std::string, std::unique_ptr<engine::SourceFile>> files_;
};

} // namespace moe::weights
