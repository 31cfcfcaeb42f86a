// Main function of the tests; those of the kernels, which are a benchmark as well, have their own.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
