// Empty ICU data, so that a static link leaves out the 30 MB of locales: splitting and NFC need only what ICU compiles
// in.
#include <unicode/udata.h>

#include <cstdint>

namespace {

// The layout of ICU's own stub (source/stubdata): a DataHeader of a table of contents ("CmnD") without entries.
struct EmptyData {
    std::uint16_t header_size = 32;
    std::uint8_t magic1 = 0xda, magic2 = 0x27;
    UDataInfo info{sizeof(UDataInfo), 0, U_IS_BIG_ENDIAN,          U_CHARSET_FAMILY,
                   sizeof(UChar),     0, {0x43, 0x6d, 0x6e, 0x44}, {1, 0, 0, 0},
                   {0, 0, 0, 0}};
    char padding[8] = {};
    std::int32_t count = 0, reserved = 0;
};

} // namespace

extern "C" {
extern const EmptyData U_ICUDATA_ENTRY_POINT;
alignas(16) const EmptyData U_ICUDATA_ENTRY_POINT{};
}
