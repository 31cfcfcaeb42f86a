"""Plans Mixture-of-Experts training: the verbs of the command moe-plan as functions, in this process.

    import moe_plan
    found = moe_plan.search("DeepSeek-V3", "gb200-nvl72", gpus=256, gbs=4096, seq=4096, precision="mxfp8", progress=print)
    print(found)
    moe_plan.replay(found.plans[0], report="report.html")
"""
from .document import Document
from .documents import Hardware, Plan, Search, SearchPlan
from .errors import Error, InvalidInput, PlanWarning, Unsatisfiable
from .verbs import compare, explain, import_plan, launch, replay, search, show, validate

__all__ = ["Document", "Error", "Hardware", "InvalidInput", "Plan", "PlanWarning", "Search", "SearchPlan", "Unsatisfiable", "compare",
           "explain", "import_plan", "launch", "replay", "search", "show", "validate"]
