// The verb export: the newest whole checkpoint of a folder as a Hugging Face folder.
#include "engine/train/huggingface.hpp"
#include "planner/base/error.hpp"
#include "tools/print/console.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/verbs.hpp"

#include <cstdio>

namespace moe::tools {

void export_verb(const ExportVerbOptions& options) {
    if (options.dtype != "fp32" && options.dtype != "bf16") refuse("--dtype {}: must be fp32 or bf16", options.dtype);
    std::vector<std::string> skipped;
    const std::unique_ptr<weights::StoredCheckpoint> checkpoint =
        weights::newest_checkpoint(options.checkpoint, skipped);
    for (const std::string& reason : skipped) std::fprintf(stderr, "skipped: %s\n", reason.c_str());
    if (!checkpoint) refuse("--checkpoint {}: holds no checkpoint of execute --checkpoint", options.checkpoint);
    train::ExportOptions how;
    how.dtype = options.dtype == "bf16" ? program::Dtype::bf16 : program::Dtype::f32;
    train::export_weights(*checkpoint, options.out, how);
    const weights::RunState& state = checkpoint->state();
    if (options.json) return print(export_document(state.step, checkpoint->shapes().size(), options.out));
    Console console(options);
    console.say("{} after step {}: {} parameters in {} as {}", state.model, state.step, checkpoint->shapes().size(),
                options.out, options.dtype);
    console.note("Next: moe-plan execute PLAN --init-from {}", options.out);
}

} // namespace moe::tools
