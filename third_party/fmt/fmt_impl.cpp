// fmt's out-of-line part, compiled from the installed headers, so that the binaries need no libfmt at run time.
#include <fmt/format-inl.h>

// The headers declare these as instantiated elsewhere; the distributions' only elsewhere is libfmt.so. What is not listed
// (vformat_to, the wide-character half) is instantiated where it is used or never used here.
FMT_BEGIN_NAMESPACE
namespace detail {
template FMT_API dragonbox::decimal_fp<float> dragonbox::to_decimal(float) noexcept;
template FMT_API dragonbox::decimal_fp<double> dragonbox::to_decimal(double) noexcept;
template FMT_API thousands_sep_result<char> thousands_sep_impl(locale_ref);
template FMT_API char decimal_point_impl(locale_ref);
#if FMT_VERSION >= 100000
template FMT_API void buffer<char>::append(const char*, const char*);
#endif
} // namespace detail
FMT_END_NAMESPACE
