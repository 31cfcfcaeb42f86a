// One tensor as torch.save writes it, a zip archive, at a place in a file.
#pragma once

#include "engine/base/source_file.hpp"
#include "engine/weights/safetensors.hpp"

#include <cstddef>
#include <string>

namespace moe::weights {

// The tensor whose archive fills `length` bytes of the file from `offset` on: its values lie there as they are, row by
// row. Nothing of it is executed: its description is read as a Pickle. Throws Error (bad_input) "PLACE: ..." for what
// is no such archive, for a tensor that is compressed, a view with gaps, or of a machine with the other order of bytes.
StoredTensor torch_tensor(const engine::SourceFile& file, std::size_t offset, std::size_t length,
                          const std::string& place);

} // namespace moe::weights
