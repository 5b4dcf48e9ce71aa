// How long blocks wait until they are asked for again, by class, and what that says of their chances.
//
// A spell of a block begins when it is asked for, and ends when it is asked for again (a reuse) or is forgotten. Ages are
// counted in accesses: the clock advances by one for each block of each prompt, so it runs as fast as the traffic. From
// the spells of a class follows the chance of a reuse in each step of age, shrunk towards the chances of larger classes
// where there are few spells. The rank of a block of some age is the best it can offer: the greatest chance of a reuse
// until some later age, over the time that it is expected to be kept for it. That is the index of Gittins (1979) for a
// bandit that pays once; LHD (Beckmann et al., NSDI 2018) ranks by the same quotient without choosing the horizon.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

class ReuseStatistics {
   public:
    static constexpr unsigned kSteps = 28;
    static constexpr unsigned kTouches = 5, kEnds = 2, kDepths = 5, kNews = 5, kGaps = 6;
    static constexpr unsigned kClasses = kTouches * kEnds * kDepths * kNews * kGaps;
    static constexpr std::uint8_t kNoGap = 0;

    ReuseStatistics();

    // The step of an age.
    static unsigned step(std::uint32_t age);
    // The first age of a step.
    static std::uint32_t first_age(unsigned step);
    // The class of a block that was asked for so often, is the last of its prompt or not, lies so deep in it, came with so
    // many blocks that were never seen before, and has this gap.
    static std::uint16_t class_of(unsigned touches, bool last, std::size_t depth, std::size_t news, std::uint8_t gap);
    // The gap of a block that is asked for at this age, and had this gap before: a mean on a logarithmic scale.
    static std::uint8_t gap_after(std::uint32_t age, std::uint8_t before);

    // A spell has ended by a reuse.
    void reused(std::uint16_t of_class, std::uint32_t age);
    // Nobody will know how a spell ends.
    void forgotten(std::uint16_t of_class, std::uint32_t age);
    // A spell goes on. Counts until the next learn().
    void open(std::uint16_t of_class, std::uint32_t age);
    // Makes the ranks anew. Old spells count for less from then on.
    void learn();

    // What was learnt, as bytes that only this version of the classes and steps understands. restore() returns false for
    // others, and then nothing has changed.
    std::vector<std::byte> saved() const;
    bool restore(std::span<const std::byte> saved);

    float rank(std::uint16_t of_class, unsigned step) const { return ranks_[of_class][step]; }

   private:
    using Steps = std::array<double, kSteps>;
    void make_ranks();
    void rank_class(std::uint16_t of_class, const Steps& chances);

    // By class and step: reuses, and spells that ended without one or are open.
    std::vector<Steps> reused_, forgotten_, open_;
    std::vector<std::array<float, kSteps>> ranks_;
};

}  // namespace kvtier
