// Declares the types of planner/program for headers that only name them.
#pragma once

namespace moe::program {

struct AllToAllAttr;
struct Bucket;
struct CostPoint;
struct MuonAttr;
struct Op;
struct PeerAttr;
struct Program;
struct RowsAttr;
struct Template;
struct Timeline;
struct TimelineRow;

} // namespace moe::program
