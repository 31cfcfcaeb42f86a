// What the page may ask: each request becomes one call of a verb, in a folder that holds the files it brought.
#pragma once

#include <string>
#include <vector>

namespace moe::tools::ui {

struct VerbCall {
    std::vector<std::string> words; // of the command line, without the command itself
    std::string result;             // file in the folder that holds the answer, empty = what is printed
    bool text = false;              // the answer is text and not a document
};

// Requests, by name:
//   show    {what: models|hardware|stacks}
//   search  {model or config, hardware, gpus, gbs, seq, precision, stack, fix[], headroom, top}
//   plan    {plan, set[]}: the report's document of the plan, after it was changed by FIELD=VALUE
//   import  {name, text, hardware, model or config, gpus, stack}
//   launch  {plan, engine}
// `config` and `text` are contents of files, `plan` is a document; they are written into `folder`. Names are of
// profiles: a word with a slash is refused, so that no file of this machine can be named. Throws Error (bad_input).
VerbCall call_of(const std::string& name, const std::string& body, const std::string& folder);

} // namespace moe::tools::ui
