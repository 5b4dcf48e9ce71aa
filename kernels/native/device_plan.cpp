#include "device_plan.hpp"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "refuse.hpp"

namespace kvtier {

namespace {

constexpr std::uint64_t kAddressMax = std::numeric_limits<std::uint64_t>::max();

bool continues(const Fragment& last, const Fragment& next) {
    return last.device + last.bytes == next.device && last.host + last.bytes == next.host && last.range == next.range &&
           last.region == next.region;
}

void append(std::vector<Fragment>& fragments, const Fragment& next) {
    if (!fragments.empty() && continues(fragments.back(), next))
        fragments.back().bytes += next.bytes;
    else
        fragments.push_back(next);
}

// Fragments that can be merged lie on one diagonal: the difference of their two addresses is the same. Fragments of one
// diagonal never overlap, as long as slots or blocks do not.
void merge_all(std::vector<Fragment>& fragments) {
    std::sort(fragments.begin(), fragments.end(), [](const Fragment& a, const Fragment& b) {
        return std::make_tuple(a.host - a.device, a.device) < std::make_tuple(b.host - b.device, b.device);
    });
    std::vector<Fragment> merged;
    for (const Fragment& fragment : fragments) append(merged, fragment);
    fragments = std::move(merged);
}

// Collects fragments into two-dimensional copies, each with the fragments that come right after it.
class RowCollector {
   public:
    void add(const Fragment& next) {
        if (!rows_.empty() && add_row(rows_.back(), next)) return;
        // Rows that are contiguous on both sides become one long row, which is part of a larger copy only by chance.
        flatten();
        rows_.push_back({next.device, next.host, next.bytes, 1, next.bytes, next.bytes, next.range, next.region});
    }
    std::size_t count() const { return rows_.size(); }
    std::vector<Rows> take() {
        flatten();
        return std::move(rows_);
    }

   private:
    static bool is_pitch(std::uint64_t pitch, std::uint64_t width) { return pitch >= width && pitch <= kPitchBytesMax; }

    static bool add_row(Rows& to, const Fragment& next) {
        if (next.bytes != to.width || next.range != to.range || next.region != to.region) return false;
        if (to.rows == 1) {
            const std::uint64_t device_pitch = next.device - to.device, host_pitch = next.host - to.host;
            if (next.device < to.device || next.host < to.host) return false;
            if (!is_pitch(device_pitch, to.width) || !is_pitch(host_pitch, to.width)) return false;
            to.device_pitch = device_pitch;
            to.host_pitch = host_pitch;
        } else if (next.device != to.device + to.rows * to.device_pitch || next.host != to.host + to.rows * to.host_pitch) {
            return false;
        }
        ++to.rows;
        return true;
    }

    void flatten() {
        if (rows_.empty()) return;
        Rows& last = rows_.back();
        if (last.device_pitch != last.width || last.host_pitch != last.width) return;
        last.width *= std::exchange(last.rows, 1);
        last.device_pitch = last.host_pitch = last.width;
    }

    std::vector<Rows> rows_;
};

}  // namespace

DevicePlan::DevicePlan(std::vector<Plane> planes, std::vector<std::uint32_t> ranges, std::uint64_t num_blocks)
    : planes_(std::move(planes)),
      ranges_(std::move(ranges)),
      num_blocks_(num_blocks),
      slot_bytes_(check_planes(planes_, num_blocks, {kAddressMax, "bases", "address space"})) {
    if (ranges_.empty()) ranges_.resize(planes_.size());
    if (ranges_.size() != planes_.size())
        refuse("ranges has ", ranges_.size(), " elements; expected ", planes_.size(), ", one for each of bases");
    for (std::size_t p = 0; p < planes_.size(); ++p)
        if (planes_[p].base == 0) refuse("bases[", p, "] is 0, which is no address");
}

DevicePlan::Placement DevicePlan::place(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const {
    if (pool.address == 0 || pool.bytes > kAddressMax - pool.address)
        refuse("pool_address is ", pool.address, ": a pool of ", pool.bytes, " bytes cannot lie there");
    for (std::size_t i = 1; i < pool.borders.size(); ++i)
        if (pool.borders[i] <= pool.borders[i - 1])
            refuse("borders[", i, "] is ", pool.borders[i], ", not more than borders[", i - 1, "], ", pool.borders[i - 1]);
    check_blocks(block_ids, slots, num_blocks_);
    check_slots(slots, slot_bytes_, pool.bytes);
    if (to_device) require_apart(block_ids, 1, "block_ids", "repeats");
    const std::vector<std::uint64_t> order = require_apart(slots, pages_of(slot_bytes_), "slots", "overlaps", to_device);

    Placement placement;
    placement.blocks.reserve(order.size());
    std::size_t region = 0;
    for (const std::uint64_t key : order) {
        const auto slot = static_cast<std::uint32_t>(key >> 32);
        const std::size_t position = key & 0xffff'ffff;
        const std::uint64_t start = std::uint64_t{slot} * kPageBytes;
        while (region < pool.borders.size() && pool.borders[region] <= start) ++region;
        if (region < pool.borders.size() && pool.borders[region] - start < slot_bytes_)
            refuse("slots[", position, "] is ", slot, ": borders[", region, "], ", pool.borders[region],
                   ", lies inside its ", slot_bytes_, " bytes");
        placement.slots_repeat |= !placement.blocks.empty() && placement.blocks.back().slot == slot;
        placement.blocks.push_back({block_ids[position], slot, static_cast<std::uint32_t>(region)});
    }
    return placement;
}

std::vector<Fragment> DevicePlan::fragments_of(const Placement& placement, std::uint64_t pool_address) const {
    // In the order of their slots, fragments follow each other on the host, so those that can be merged are neighbours.
    std::vector<Fragment> fragments;
    fragments.reserve(std::min<std::size_t>(placement.blocks.size() * planes_.size(), std::size_t{1} << 16));
    for (const Placed& placed : placement.blocks) {
        std::uint64_t host = pool_address + std::uint64_t{placed.slot} * kPageBytes;
        for (std::size_t p = 0; p < planes_.size(); ++p) {
            const Plane& plane = planes_[p];
            append(fragments, {plane.base + placed.block * plane.block_stride, host, plane.fragment_bytes, ranges_[p],
                               placed.region});
            host += plane.fragment_bytes;
        }
    }
    // That does not hold if a slot comes several times, because then several blocks precede what follows it.
    if (placement.slots_repeat) merge_all(fragments);
    return fragments;
}

std::vector<Fragment> DevicePlan::describe(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const {
    return fragments_of(place(block_ids, pool, slots, to_device), pool.address);
}

std::vector<Rows> DevicePlan::describe_rows(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const {
    const Placement placement = place(block_ids, pool, slots, to_device);
    RowCollector over_planes;
    for (const Fragment& fragment : fragments_of(placement, pool.address)) over_planes.add(fragment);

    // Planes that continue each other in every block count as one.
    struct Whole {
        Plane plane;
        std::uint64_t offset;
        std::uint32_t range;
    };
    std::vector<Whole> wholes;
    std::uint64_t offset = 0;
    for (std::size_t p = 0; p < planes_.size(); ++p) {
        const Plane& plane = planes_[p];
        if (!wholes.empty() && wholes.back().plane.base + wholes.back().plane.fragment_bytes == plane.base &&
            wholes.back().plane.block_stride == plane.block_stride && wholes.back().range == ranges_[p])
            wholes.back().plane.fragment_bytes += plane.fragment_bytes;
        else
            wholes.push_back({plane, offset, ranges_[p]});
        offset += plane.fragment_bytes;
    }
    if (wholes.size() == 1) return over_planes.take();

    RowCollector over_blocks;
    for (const Whole& whole : wholes)
        for (const Placed& placed : placement.blocks) {
            over_blocks.add({whole.plane.base + placed.block * whole.plane.block_stride,
                             pool.address + std::uint64_t{placed.slot} * kPageBytes + whole.offset,
                             whole.plane.fragment_bytes, whole.range, placed.region});
            if (over_blocks.count() >= over_planes.count()) return over_planes.take();
        }
    return over_blocks.take();
}

}  // namespace kvtier
