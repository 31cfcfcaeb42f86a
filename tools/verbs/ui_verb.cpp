// The verb ui: serves the page of plans on this machine until it is interrupted.
#include "tools/ui/server.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/schema.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/page/page.hpp"
#include "tools/print/console.hpp"
#include "tools/report/stamp.hpp"
#include "tools/verbs/verbs.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

void ui_verb(const UiOptions& options) {
    if (options.port < 0 || options.port > 65535) refuse("--port {}: must be 0 to 65535", options.port);
    const nlohmann::ordered_json data = {{"version", MOE_PLAN_VERSION}, {"fields", plan::field_names()}};
    profiles_folder(); // without profiles no request could be answered: said before the page is opened
    ui::ServerOptions server;
    server.listen = options.listen;
    server.port = static_cast<int>(options.port);
    server.page = page("moe-plan", data.dump(), true);
    ui::serve(server, [&options](const std::string& address) {
        if (options.json) return print(stamped(schema::ui, {{"address", address}}));
        Console console(options);
        console.say("{}", address);
        console.note("Open this address in a browser; Ctrl-C ends it.");
    });
}

} // namespace moe::tools
