#include "reuse_statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvtier {

namespace {

constexpr unsigned kSteps = ReuseStatistics::kSteps;
constexpr unsigned kGaps = ReuseStatistics::kGaps;
constexpr unsigned kFamilies = ReuseStatistics::kTouches * ReuseStatistics::kEnds * kGaps;

// The first step lasts so many accesses, and each other one so many times as long as the one before.
constexpr double kFirstStep = 40, kGrowth = 1.5;
// The first gap is shorter than this, and so much longer is each other one.
constexpr double kFirstGap = 100, kGapGrowth = 2.5;
constexpr double kGapScale = 8;      // steps of the logarithm of a gap, per doubling
constexpr double kNewestGap = 0.6;   // the weight of the newest gap
constexpr double kFamilyPrior = 4;   // spells that a family borrows from what is above it
constexpr double kFactorPrior = 50;  // reuses that a factor borrows
constexpr double kClassPrior = 400;  // spells that a class borrows from its family
constexpr double kKept = 0.995;      // of old spells, each time it is learnt
constexpr double kChanceMin = 1e-6, kChanceMax = 0.95;
// What saved bytes begin with. Change it when classes, steps or the meaning of a count change.
constexpr char kSavedAs[8] = {'k', 'v', 'r', 'e', 'u', 's', 'e', '1'};

using Ages = std::array<double, kSteps + 1>;

Ages make_ages() {
    Ages ages{};
    double width = kFirstStep;
    for (unsigned k = 1; k <= kSteps; ++k, width *= kGrowth) ages[k] = ages[k - 1] + width;
    ages[kSteps] = std::numeric_limits<double>::infinity();
    return ages;
}

const Ages kAges = make_ages();

// The parts of a class.
struct Parts {
    unsigned family;  // touches, end, gap
    unsigned depth;
    unsigned news;
};

constexpr Parts parts_of(unsigned of_class) {
    const unsigned gap = of_class % kGaps;
    unsigned rest = of_class / kGaps;
    const unsigned news = rest % ReuseStatistics::kNews;
    rest /= ReuseStatistics::kNews;
    const unsigned depth = rest % ReuseStatistics::kDepths;
    return {rest / ReuseStatistics::kDepths * kGaps + gap, depth, news};
}

unsigned size_class(std::size_t number) { return number <= 1 ? 0 : number <= 4 ? 1 : number <= 16 ? 2 : number <= 64 ? 3 : 4; }

}  // namespace

ReuseStatistics::ReuseStatistics()
    : reused_(kClasses, Steps{}), forgotten_(kClasses, Steps{}), open_(kClasses, Steps{}), ranks_(kClasses) {
    learn();
}

unsigned ReuseStatistics::step(std::uint32_t age) {
    return static_cast<unsigned>(std::upper_bound(kAges.begin(), kAges.end(), double{1} * age) - kAges.begin()) - 1;
}

std::uint32_t ReuseStatistics::first_age(unsigned step) { return static_cast<std::uint32_t>(std::ceil(kAges[step])); }

std::uint16_t ReuseStatistics::class_of(unsigned touches, bool last, std::size_t depth, std::size_t news, std::uint8_t gap) {
    const unsigned touched = touches <= 1 ? 0 : touches == 2 ? 1 : touches <= 4 ? 2 : touches <= 8 ? 3 : 4;
    const unsigned deep = depth < 1 ? 0 : depth < 4 ? 1 : depth < 16 ? 2 : depth < 64 ? 3 : 4;
    unsigned waits = 0;
    if (gap != kNoGap) {
        const double accesses = std::exp2((gap - 1) / kGapScale) - 1;
        double bound = kFirstGap;
        for (waits = 1; waits < kGaps - 1 && accesses >= bound; ++waits) bound *= kGapGrowth;
    }
    return static_cast<std::uint16_t>((((touched * kEnds + last) * kDepths + deep) * kNews + size_class(news)) * kGaps + waits);
}

std::uint8_t ReuseStatistics::gap_after(std::uint32_t age, std::uint8_t before) {
    double logarithm = std::log2(double{1} * age + 1) * kGapScale;
    if (before != kNoGap) logarithm = kNewestGap * logarithm + (1 - kNewestGap) * (before - 1);
    return static_cast<std::uint8_t>(std::min(254.0, std::round(logarithm)) + 1);
}

void ReuseStatistics::reused(std::uint16_t of_class, std::uint32_t age) { reused_[of_class][step(age)] += 1; }

void ReuseStatistics::forgotten(std::uint16_t of_class, std::uint32_t age) { forgotten_[of_class][step(age)] += 1; }

void ReuseStatistics::open(std::uint16_t of_class, std::uint32_t age) { open_[of_class][step(age)] += 1; }

void ReuseStatistics::learn() {
    make_ranks();
    for (unsigned c = 0; c < kClasses; ++c)
        for (unsigned k = 0; k < kSteps; ++k) {
            reused_[c][k] *= kKept;
            forgotten_[c][k] *= kKept;
        }
}

void ReuseStatistics::make_ranks() {
    // Spells at risk in each step: those that came to its end, those reused in it, and half of those that were last seen in
    // it without a reuse.
    std::vector<Steps> risk(kClasses);
    for (unsigned c = 0; c < kClasses; ++c) {
        double later = 0;
        for (unsigned k = kSteps; k-- > 0;) {
            const double unknown = forgotten_[c][k] + open_[c][k];
            risk[c][k] = later + reused_[c][k] + unknown / 2;
            later += reused_[c][k] + unknown;
        }
        open_[c] = Steps{};
    }

    Steps all_reused{}, all_risk{};
    std::vector<Steps> reused(kFamilies, Steps{}), at_risk(kFamilies, Steps{});
    std::vector<Steps> wide_reused(kFamilies / kGaps, Steps{}), wide_risk(kFamilies / kGaps, Steps{});
    for (unsigned c = 0; c < kClasses; ++c) {
        const unsigned family = parts_of(c).family;
        for (unsigned k = 0; k < kSteps; ++k) {
            all_reused[k] += reused_[c][k];
            all_risk[k] += risk[c][k];
            reused[family][k] += reused_[c][k];
            at_risk[family][k] += risk[c][k];
            wide_reused[family / kGaps][k] += reused_[c][k];
            wide_risk[family / kGaps][k] += risk[c][k];
        }
    }
    std::vector<Steps> chances(kFamilies);
    for (unsigned family = 0; family < kFamilies; ++family)
        for (unsigned k = 0; k < kSteps; ++k) {
            // Before anything is known, the older a block, the less its chance: that is LRU.
            const double any = std::min(0.9, (all_reused[k] + 1) / (all_risk[k] + k + 2));
            const unsigned wide = family / kGaps;
            const double wider = (wide_reused[wide][k] + kFamilyPrior * any) / (wide_risk[wide][k] + kFamilyPrior);
            chances[family][k] = (reused[family][k] + kFamilyPrior * wider) / (at_risk[family][k] + kFamilyPrior);
        }

    std::array<double, kDepths> by_depth;
    std::array<double, kNews> by_news;
    by_depth.fill(1);
    by_news.fill(1);
    for (int round = 0; round < 2; ++round) {
        std::array<double, kDepths> seen_depth{}, expected_depth{};
        for (unsigned c = 0; c < kClasses; ++c) {
            const Parts parts = parts_of(c);
            for (unsigned k = 0; k < kSteps; ++k) {
                seen_depth[parts.depth] += reused_[c][k];
                expected_depth[parts.depth] += risk[c][k] * chances[parts.family][k] * by_news[parts.news];
            }
        }
        for (unsigned i = 0; i < kDepths; ++i) by_depth[i] = (seen_depth[i] + kFactorPrior) / (expected_depth[i] + kFactorPrior);
        std::array<double, kNews> seen_news{}, expected_news{};
        for (unsigned c = 0; c < kClasses; ++c) {
            const Parts parts = parts_of(c);
            for (unsigned k = 0; k < kSteps; ++k) {
                seen_news[parts.news] += reused_[c][k];
                expected_news[parts.news] += risk[c][k] * chances[parts.family][k] * by_depth[parts.depth];
            }
        }
        for (unsigned i = 0; i < kNews; ++i) by_news[i] = (seen_news[i] + kFactorPrior) / (expected_news[i] + kFactorPrior);
    }

    for (unsigned c = 0; c < kClasses; ++c) {
        const Parts parts = parts_of(c);
        Steps own;
        for (unsigned k = 0; k < kSteps; ++k) {
            const double expected = chances[parts.family][k] * by_depth[parts.depth] * by_news[parts.news];
            const double chance = (reused_[c][k] + kClassPrior * expected) / (risk[c][k] + kClassPrior);
            own[k] = std::clamp(chance, kChanceMin, kChanceMax);
        }
        rank_class(static_cast<std::uint16_t>(c), own);
    }
}

void ReuseStatistics::rank_class(std::uint16_t of_class, const Steps& chances) {
    for (unsigned k = 0; k + 1 < kSteps; ++k) {
        double left = 1, held = 0, best = 0;
        for (unsigned j = k; j + 1 < kSteps; ++j) {
            // On average, half of the step in which the block is now is over.
            const double width = (kAges[j + 1] - kAges[j]) * (j == k ? 0.5 : 1);
            const double chance = chances[j] * (j == k ? 0.75 : 1);
            held += left * width * (1 - chance / 2);
            left *= 1 - chance;
            best = std::max(best, (1 - left) / held);
        }
        ranks_[of_class][k] = static_cast<float>(best);
    }
    ranks_[of_class][kSteps - 1] = 0;
}

std::vector<std::byte> ReuseStatistics::saved() const {
    std::vector<std::byte> out(sizeof kSavedAs);
    std::memcpy(out.data(), kSavedAs, sizeof kSavedAs);
    for (const std::vector<Steps>* counts : {&reused_, &forgotten_})
        for (const Steps& steps : *counts)
            for (const double count : steps) {
                const float narrow = static_cast<float>(count);
                const auto* const bytes = reinterpret_cast<const std::byte*>(&narrow);
                out.insert(out.end(), bytes, bytes + sizeof narrow);
            }
    return out;
}

bool ReuseStatistics::restore(std::span<const std::byte> saved) {
    constexpr std::size_t kCounts = 2 * std::size_t{kClasses} * kSteps;
    if (saved.size() != sizeof kSavedAs + kCounts * sizeof(float)) return false;
    if (std::memcmp(saved.data(), kSavedAs, sizeof kSavedAs) != 0) return false;
    std::vector<float> counts(kCounts);
    std::memcpy(counts.data(), saved.data() + sizeof kSavedAs, kCounts * sizeof(float));
    if (!std::all_of(counts.begin(), counts.end(), [](float count) { return count >= 0 && count < 1e18f; })) return false;
    auto next = counts.begin();
    for (std::vector<Steps>* into : {&reused_, &forgotten_})
        for (Steps& steps : *into)
            for (double& count : steps) count = *next++;
    make_ranks();
    return true;
}

}  // namespace kvtier
