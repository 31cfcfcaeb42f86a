// Headers that most tests read, compiled once for each of their programs (Meson's b_pch).
#include "third_party/pch/common.hpp"

#include <doctest/doctest.h>
