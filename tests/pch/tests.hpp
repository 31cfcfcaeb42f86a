// Headers that most tests read, compiled once for each of their programs where Meson's b_pch is on (tools/check).
#include "third_party/pch/common.hpp"

#include <doctest/doctest.h>
