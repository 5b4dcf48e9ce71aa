// The native core under several threads, for the sanitizers to watch. Every part checks its own results; the program's
// exit status is 1 if one is wrong. Seeds are fixed; the threads' timing is what varies.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "block_table.hpp"
#include "checksum.hpp"
#include "copy_plan.hpp"
#include "device_plan.hpp"
#include "one_caller.hpp"
#include "pool_records.hpp"
#include "words.hpp"

namespace {

using namespace kvtier;

std::atomic<bool> failed{false};

void require(bool holds, const char* what) {
    if (holds) return;
    failed = true;
    std::fprintf(stderr, "stress: not true: %s\n", what);
}

void together(const std::vector<std::function<void()>>& bodies) {
    std::vector<std::thread> threads;
    for (const auto& body : bodies) threads.emplace_back(body);
    for (std::thread& thread : threads) thread.join();
}

// A worker writes data and ends the part; the client, seeing DONE, reads that data. Part words are the only order there is.
void parts_publish_data() {
    constexpr std::uint64_t kParts = 20000;
    alignas(8) static std::uint64_t memory[3];
    Words words(memory, sizeof memory, 3);
    static std::uint64_t data;  // plain: a race here is a missing release or acquire
    std::uint64_t done = 0, revoked = 0;
    together({
        [&] {
            for (std::uint64_t ticket = 1; ticket <= kParts; ++ticket) {
                // The doorbell says that the client has stopped reading the data of the part before.
                while (words.load(1) < ticket) std::this_thread::yield();
                if (!words.try_start(0, ticket)) continue;
                data = ticket;
                words.finish(0, ticket, kPartDone);
            }
        },
        [&] {
            for (std::uint64_t ticket = 1; ticket <= kParts; ++ticket) {
                words.ring(1, ticket);
                if (ticket % 3 == 0 && words.try_revoke(0, ticket)) {
                    ++revoked;
                    continue;
                }
                while (words.part_state(0, ticket) < kPartDone) std::this_thread::yield();
                require(words.part_state(0, ticket) == kPartDone, "the part is DONE");
                require(data == ticket, "the data of the part is visible");
                ++done;
            }
        },
        [&] {
            for (std::uint64_t i = 0; i < kParts; ++i) {
                words.ring(2, i);
                require(words.load(2) >= i, "a doorbell never goes back");
            }
        },
        [&] {
            for (std::uint64_t i = 0; i < kParts; ++i) words.ring(2, i / 2);
        },
    });
    require(done + revoked == kParts, "every part has one end");
    require(words.load(2) == kParts - 1, "the doorbell is where it was rung to");
}

void copies_of_disjoint_blocks() {
    constexpr std::uint32_t kBlocks = 48, kThreads = 4;
    for (const std::uint64_t fragment : {std::uint64_t{700}, std::uint64_t{4096}, std::uint64_t{10000}}) {
        std::vector<std::byte> mapping(3 * fragment * kBlocks);
        std::mt19937 random(7);
        for (std::byte& byte : mapping) byte = static_cast<std::byte>(random());
        const std::vector<std::byte> original = mapping;
        const CopyPlan plan(mapping.data(), mapping.size(),
                            {{0, fragment, fragment},
                             {fragment * kBlocks, 2 * fragment, fragment},
                             {fragment * kBlocks + fragment, 2 * fragment, fragment}},
                            kBlocks);
        const auto pages = static_cast<std::uint32_t>((plan.slot_bytes() + kPageBytes - 1) / kPageBytes);
        std::vector<std::byte> memory((1 + pages * kBlocks) * kPageBytes);
        const Pool pool{memory.data(), memory.size()};
        std::vector<std::function<void()>> bodies;
        for (std::uint32_t thread = 0; thread < kThreads; ++thread)
            bodies.emplace_back([&, thread] {
                std::vector<std::uint32_t> ids, slots;
                for (std::uint32_t id = thread; id < kBlocks; id += kThreads) {
                    ids.push_back(id);
                    slots.push_back(1 + pages * (kBlocks - 1 - id));
                }
                std::vector<std::uint64_t> sums(ids.size()), again(ids.size());
                for (int round = 0; round < 5; ++round) {
                    plan.gather(ids, pool, slots, sums.data());
                    plan.checksums(pool, slots, again.data());
                    require(sums == again, "the checksum is of what was copied");
                    plan.scatter(ids, pool, slots);
                }
            });
        together(bodies);
        require(mapping == original, "blocks came back unchanged");
    }
}

// One plan shared by threads: what each describes, carried out, is what it asked for, whatever the order of its blocks.
void plans_of_device_copies() {
    constexpr std::uint32_t kBlocks = 600, kThreads = 4;
    constexpr std::uint64_t kFragment = 2048, kPlanes = 2;  // slots without room between them
    std::vector<std::byte> device(kPlanes * kFragment * kBlocks), memory((1 + kBlocks) * kPageBytes);
    std::mt19937 seeds(11);
    for (std::byte& byte : device) byte = static_cast<std::byte>(seeds());
    const auto device_address = reinterpret_cast<std::uint64_t>(device.data());
    const auto pool_address = reinterpret_cast<std::uint64_t>(memory.data());
    for (const bool interleaved : {false, true}) {
        const std::uint64_t stride = interleaved ? kPlanes * kFragment : kFragment;
        const std::uint64_t second = interleaved ? kFragment : kFragment * kBlocks;
        const DevicePlan plan({{device_address, stride, kFragment}, {device_address + second, stride, kFragment}}, {},
                              kBlocks);
        std::vector<std::function<void()>> bodies;
        for (std::uint32_t thread = 0; thread < kThreads; ++thread)
            bodies.emplace_back([&, thread] {
                std::mt19937 random(thread);
                std::vector<std::uint32_t> ids(kBlocks / kThreads);
                std::iota(ids.begin(), ids.end(), thread * kBlocks / kThreads);
                for (int round = 0; round < 20; ++round) {
                    if (round % 3 == 1) std::reverse(ids.begin(), ids.end());
                    if (round % 3 == 2) std::shuffle(ids.begin(), ids.end(), random);
                    std::vector<std::uint32_t> slots(ids);
                    for (std::uint32_t& slot : slots) ++slot;
                    const std::uint64_t borders[] = {kPageBytes, (kBlocks / 2 + 1) * kPageBytes};
                    const HostSide pool{pool_address, memory.size(), borders};
                    for (const std::uint32_t slot : slots) std::memset(&memory[slot * kPageBytes], 0, kPageBytes);
                    if (round % 2 == 0) {
                        for (const Fragment& copy : plan.describe(ids, pool, slots, false))
                            std::memcpy(reinterpret_cast<void*>(copy.host), reinterpret_cast<void*>(copy.device),
                                        copy.bytes);
                    } else {
                        for (const Rows& copy : plan.describe_rows(ids, pool, slots, false))
                            for (std::uint64_t row = 0; row < copy.rows; ++row)
                                std::memcpy(reinterpret_cast<void*>(copy.host + row * copy.host_pitch),
                                            reinterpret_cast<void*>(copy.device + row * copy.device_pitch), copy.width);
                    }
                    for (std::size_t i = 0; i < ids.size(); ++i)
                        for (std::uint64_t plane = 0; plane < kPlanes; ++plane)
                            require(std::memcmp(&memory[slots[i] * kPageBytes + plane * kFragment],
                                                &device[plane * second + ids[i] * stride], kFragment) == 0,
                                    "the slot holds its block");
                    std::vector<std::uint32_t> wrong(slots);
                    wrong.back() = wrong.front();
                    try {
                        plan.describe(ids, pool, wrong, false);
                        require(false, "slots that overlap are refused");
                    } catch (const std::invalid_argument&) {
                    }
                }
            });
        together(bodies);
    }
}

// One table's random life against counts kept beside it.
void life_of_a_table(std::uint64_t seed) {
    constexpr std::size_t kCapacity = 500, kKeys = 800, kPages = 3000;
    BlockTable table(kCapacity, kPages, seed);
    std::mt19937_64 random(seed);
    std::vector<std::uint8_t> hashes(kKeys * kHashBytes);
    for (std::size_t key = 0; key < kKeys; ++key) std::memcpy(&hashes[key * kHashBytes], &key, sizeof key);
    std::vector<std::uint32_t> free_pages(kPages - 1), entries(kKeys), found(kKeys);
    std::iota(free_pages.begin(), free_pages.end(), 1u);
    std::vector<std::uint8_t> created(kKeys), states(kKeys);
    for (int round = 0; round < 300; ++round) {
        const std::size_t count = 1 + random() % 64, start = random() % (kKeys - count);
        const std::span<const std::uint8_t> keys(&hashes[start * kHashBytes], count * kHashBytes);
        table.insert(1, static_cast<std::uint16_t>(random() % 3), keys, 0, entries.data(), created.data());
        std::vector<std::uint32_t> fresh, slots;
        for (std::size_t i = 0; i < count; ++i)
            if (created[i] == kCreated) fresh.push_back(entries[i]);
        for (std::size_t i = 0; i < 2 * fresh.size(); ++i) {
            slots.push_back(free_pages.back());
            free_pages.pop_back();
        }
        table.attach_slots(fresh, slots.data(), 2);
        table.commit(fresh);
        table.pin(fresh);
        table.touch(fresh);
        std::vector<std::uint32_t> wrong = fresh;
        wrong.push_back(kNoEntry);
        try {
            table.unpin(wrong);
            require(false, "a dead entry is refused");
        } catch (const std::invalid_argument&) {
        }
        table.unpin(fresh);
        if (random() % 4 == 0) table.cool(fresh);
        table.lookup(1, keys, found.data(), states.data());
        for (std::size_t i = 0; i < count; ++i) require(found[i] == entries[i], "lookup finds what insert made");
        for (std::uint16_t domain = 0; domain < 3; ++domain) {
            std::vector<std::uint32_t> victims(random() % 40);
            victims.resize(table.victims(domain, victims.size(), victims.data()));
            std::vector<std::uint32_t> freed(2 * victims.size());
            table.slots(victims, 2, freed.data());
            table.begin_evict(victims);
            table.remove(victims);
            free_pages.insert(free_pages.end(), freed.begin(), freed.end());
        }
        if (round % 50 == 0) require(table.check().empty(), "the table is consistent");
    }
    require(table.check().empty(), "the table is consistent");
    require(table.count(1) * 2 + free_pages.size() == kPages - 1, "no slot was lost");
}

// Threads that do not know of each other: whoever is inside is alone, and hands over what it wrote.
void one_caller_at_a_time() {
    OneCaller<BlockTable> guarded("table", std::size_t{5000}, std::size_t{10}, std::uint64_t{3});
    std::atomic<std::size_t> inserted{0}, refused{0};
    std::vector<std::function<void()>> bodies;
    for (std::uint32_t space = 0; space < 4; ++space)
        bodies.emplace_back([&, space] {
            for (std::uint64_t key = 0; key < 1000;) {
                std::uint8_t hash[kHashBytes] = {}, created = 0;
                std::uint32_t entry = 0;
                std::memcpy(hash, &key, sizeof key);
                try {
                    const OneCaller<BlockTable>::Entered table(guarded);
                    table->insert(space, 0, hash, 0, &entry, &created);
                    inserted += created == kCreated;
                    ++key;
                } catch (const std::runtime_error&) {
                    ++refused;
                    std::this_thread::yield();
                }
            }
        });
    together(bodies);
    require(inserted == 4000, "every insert took place once");
    const OneCaller<BlockTable>::Entered table(guarded);
    require(table->check().empty() && table->count(2) == 1000, "the table is consistent");
}

// A pool with one extent in use.
struct SmallPool {
    std::vector<std::uint64_t> words;
    std::optional<pool::Records> records;

    explicit SmallPool(std::uint64_t slot_bytes)
        : words((pool::header_area_bytes + pool::extent_bytes_min) / sizeof(std::uint64_t)) {
        const std::uint8_t digest[16] = {};
        pool::Records::format(base(), words.size() * 8, pool::extent_bytes_min, 1, digest, 0, false, 1);
        records.emplace(base(), words.size() * 8, 0);
        records->format_extent(0, slot_bytes);
    }
    std::uint8_t* base() { return reinterpret_cast<std::uint8_t*>(words.data()); }
    std::uint32_t slot(std::uint64_t i) const {
        pool::Extent extent;
        require(records->extent(0, extent), "the extent is in use");
        return static_cast<std::uint32_t>(extent.slot_offset(i) / pool::page_bytes);
    }
    std::uint8_t* data(std::uint64_t i) { return base() + slot(i) * pool::page_bytes; }
};

// One slot goes from block to block, each of which ends in the same place under another checksum. Meanwhile others ask for the
// checksum of one of these blocks: they get that one's, or none.
void checksums_between_pools() {
    constexpr std::uint64_t kRounds = 3000, kDataBytes = 700;
    SmallPool source(5000), copies(9000);
    const std::uint8_t name[16] = {};
    const auto key = [&](std::uint64_t block, std::uint8_t* hash) {
        std::memset(hash, 0, kHashBytes);
        std::memcpy(hash, &block, sizeof block);
        return pool::OpenFields{1, 0, 0, 1, kDataBytes, 1, block, name, hash};
    };
    // Even blocks are what the copies' data are; odd ones are not.
    std::uint64_t sums[2];
    for (const std::uint64_t i : {1u, 2u}) std::memset(copies.data(i), 5, kDataBytes);
    sums[0] = xxh3_64(copies.data(1), kDataBytes);
    sums[1] = sums[0] ^ 1;
    std::atomic<std::uint64_t> generation_now{0}, taken{0}, refused{0};
    std::atomic<bool> ended{false};
    std::vector<std::function<void()>> bodies;
    bodies.emplace_back([&] {
        const std::uint32_t slot[] = {source.slot(3)};
        std::uint8_t hash[kHashBytes];
        for (std::uint64_t block = 1; block <= kRounds; ++block) {
            std::uint64_t generation = 0;
            const std::uint64_t clock = block;
            source.records->open(slot, key(block % 2, hash), &generation);
            source.records->set_data_checksums(slot, &generation, &sums[block % 2]);
            source.records->commit(slot, &clock);
            generation_now = generation;
            if (block % 8 == 0) std::this_thread::yield();
            if (block == kRounds) break;  // the last one stays
            source.records->free(slot);
        }
        ended = true;
    });
    for (const std::uint64_t i : {1u, 2u})
        bodies.emplace_back([&, i] {
            const std::uint32_t slot[] = {copies.slot(i)}, from[] = {source.slot(3)};
            std::uint8_t hash[kHashBytes];
            for (bool last = false; !last;) {
                last = ended;
                for (const std::uint64_t block : {0u, 1u}) {
                    std::uint64_t generation = 0, sum = 0;
                    const std::uint64_t clock = 0, wanted = generation_now;
                    copies.records->open(slot, key(block, hash), &generation);
                    const pool::Source row{*source.records, from, &wanted};
                    std::uint8_t result = 0, good = 0;
                    if (i == 1)
                        copies.records->adopt(slot, &generation, row, &result);
                    else
                        copies.records->accept(slot, &generation, row, &sums[0], &result);
                    copies.records->commit(slot, &clock);
                    copies.records->data_sums(slot, &generation, &sum, &good);
                    require(good == 1, "the copy is READY");
                    require(sum == (result == 1 ? sums[block] : 0), "a copy has the checksum of its block, or none");
                    require(i == 1 || result != (block == 0 ? 2 : 1), "data are accepted for their own checksum only");
                    ++(result == 0 ? refused : taken);
                    copies.records->free(slot);
                }
            }
        });
    together(bodies);
    require(taken >= 2 && refused >= 2, "checksums were taken over and refused");
}

// All variants that this processor can run give the same number, whole and in pieces.
void checksums_agree() {
    std::vector<std::uint8_t> data(70001);
    std::mt19937 random(1);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
    for (const std::size_t bytes : {0ul, 1ul, 240ul, 241ul, 4096ul, 70001ul}) {
        const std::uint64_t expected = checksum_ops_portable().hash(data.data(), bytes);
        for (const ChecksumOps* ops : checksum_variants())
            require(ops->hash(data.data(), bytes) == expected, "variants of the checksum agree");
        Checksum checksum;
        for (std::size_t done = 0; done < bytes; done += 1000)
            checksum.update(data.data() + done, std::min<std::size_t>(1000, bytes - done));
        require(checksum.digest() == expected, "pieces and the whole have one checksum");
    }
}

}  // namespace

int main() {
    parts_publish_data();
    copies_of_disjoint_blocks();
    plans_of_device_copies();
    together({[] { life_of_a_table(1); }, [] { life_of_a_table(2); }});
    one_caller_at_a_time();
    checksums_between_pools();
    checksums_agree();
    std::puts(failed ? "stress: FAILED" : "stress: passed");
    return failed ? 1 : 0;
}
