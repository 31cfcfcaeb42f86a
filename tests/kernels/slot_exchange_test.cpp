// The arithmetic of chunks: how much of a slot moves, and which part of it a block has.
#include "kernels/slot_exchange.hpp"

#include <doctest/doctest.h>

#include <initializer_list>

using namespace moe;

TEST_CASE("slot exchange: rows are rounded up to chunks, at most to the slot's end") {
    constexpr ChunkShape shape{300, 128, 32, false};
    static_assert(shape.slot_bytes() == 9600);
    CHECK(shape.moved_bytes(0) == 0);
    CHECK(shape.moved_bytes(-3) == 0); // as the kernels take a count that nobody has written
    CHECK(shape.moved_bytes(1) == 128 * 32);
    CHECK(shape.moved_bytes(128) == 128 * 32);
    CHECK(shape.moved_bytes(129) == 256 * 32);
    CHECK(shape.moved_bytes(257) == 300 * 32);
    CHECK(shape.moved_bytes(300) == 300 * 32);
    CHECK(shape.moved_bytes(400) == 300 * 32);
    CHECK(ChunkShape{7, 128, 4, false}.moved_bytes(2) == 28);
}

TEST_CASE("slot exchange: blocks share a slot's bytes in whole pages, without gap or overlap") {
    for (const int blocks : {1, 5, 24, 32})
        for (const std::int64_t bytes :
             std::initializer_list<std::int64_t>{0, 2, 4096, 4098, 9600, 1000000, 33554432}) {
            std::int64_t next = 0, most = 0;
            for (int b = 0; b < blocks; ++b) {
                const BlockPart part = part_of(bytes, blocks, b);
                if (part.bytes == 0) continue;
                CHECK(part.first == next);
                CHECK(part.first % 4096 == 0);
                next = part.first + part.bytes;
                most = part.bytes > most ? part.bytes : most;
            }
            INFO(blocks, " blocks, ", bytes, " bytes");
            CHECK(next == bytes);
            CHECK(most <= bytes / blocks + 4096);
        }
}
