// The look of --help: descriptions wrapped into 80 columns.
#pragma once

#include <memory>

namespace CLI {
class FormatterBase;
}

namespace moe::tools {

std::shared_ptr<CLI::FormatterBase> help_formatter();

} // namespace moe::tools
