// Guards an object that has one writer: for a second thread that comes in it throws, and the thread touches nothing.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvtier {

template <class Guarded>
class OneCaller {
   public:
    template <class... Arguments>
    explicit OneCaller(const char* name, Arguments&&... arguments)
        : name_(name), guarded_(std::forward<Arguments>(arguments)...) {}

    // Access as long as this object lives. Throws std::runtime_error if another thread has it.
    class Entered {
       public:
        explicit Entered(OneCaller& owner) : owner_(owner) {
            if (owner_.busy_.exchange(true, std::memory_order_acquire))
                throw std::runtime_error(std::string(owner_.name_) + " is in use by another thread; it has one writer");
        }
        Entered(const Entered&) = delete;
        Entered& operator=(const Entered&) = delete;
        ~Entered() { owner_.busy_.store(false, std::memory_order_release); }
        Guarded* operator->() const { return &owner_.guarded_; }
        Guarded& operator*() const { return owner_.guarded_; }

       private:
        OneCaller& owner_;
    };

   private:
    const char* name_;
    Guarded guarded_;
    std::atomic<bool> busy_{false};
};

}  // namespace kvtier
