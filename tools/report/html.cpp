// Writes the HTML report: the page with a plan's data inside.
#include "tools/report/html.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "tools/page/page.hpp"
#include "tools/report/report_data.hpp"

#include <fmt/format.h>

namespace moe::tools {

std::string html_report(const Explanation& e, const std::string& command) {
    const std::string title = fmt::format("{} on {} \u00d7 {}", e.plan.model->name, e.plan.gpus, e.plan.hardware->name);
    return page(title, report_document(e, command), false);
}

} // namespace moe::tools
