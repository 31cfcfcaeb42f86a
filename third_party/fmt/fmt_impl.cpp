// fmt's out-of-line part, compiled from the installed headers, so that the binaries need no libfmt at run time.
#include <fmt/format-inl.h>
