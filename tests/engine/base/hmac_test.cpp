// SHA-256 and HMAC against published vectors.
#include "engine/base/hmac.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <string>

using namespace moe;

namespace {

std::string hex(const engine::Digest& digest) {
    std::string text;
    for (const std::uint8_t byte : digest) text += fmt::format("{:02x}", byte);
    return text;
}

} // namespace

// FIPS 180-4 examples; lengths around a block's end, where the padding needs another block (values of coreutils'
// sha256sum).
TEST_CASE("sha256: published examples, and lengths around the end of a block") {
    CHECK(hex(engine::sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(engine::sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex(engine::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex(engine::sha256(std::string(55, 'a'))) ==
          "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
    CHECK(hex(engine::sha256(std::string(64, 'a'))) ==
          "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
    CHECK(hex(engine::sha256(std::string(1'000'000, 'a'))) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("hmac_sha256: the vectors of RFC 4231") {
    std::string ascending;
    for (char c = 1; c <= 25; ++c) ascending.push_back(c);
    const std::string long_key(131, '\xaa');
    const struct {
        std::string key, message;
        const char* digest;
    } vectors[] = {
        {std::string(20, '\x0b'), "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {std::string(20, '\xaa'), std::string(50, '\xdd'),
         "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {ascending, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {long_key, "Test Using Larger Than Block-Size Key - Hash Key First",
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {long_key,
         "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
         "hashed before being used by the HMAC algorithm.",
         "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (const auto& vector : vectors) {
        CAPTURE(vector.message);
        CHECK(hex(engine::hmac_sha256(vector.key, vector.message)) == vector.digest);
    }
    // Case 5 of the RFC publishes 128 bits.
    CHECK(hex(engine::hmac_sha256(std::string(20, '\x0c'), "Test With Truncation")).substr(0, 32) ==
          "a3b6167473100ee06e0c796c2955552b");
}

TEST_CASE("same_digest: equal in every byte") {
    const engine::Digest digest = engine::sha256("abc");
    CHECK(engine::same_digest(digest, digest));
    for (std::size_t i = 0; i < digest.size(); ++i) {
        engine::Digest other = digest;
        other[i] = static_cast<std::uint8_t>(other[i] ^ 0x80);
        CHECK_FALSE(engine::same_digest(digest, other));
    }
}
