//! Compiles a loop twice: for any processor, and for processors with wide registers and newer bit instructions.
//!
//! The result is the same: the loops of this crate are integer arithmetic.
#![allow(unsafe_code)]

/// Run `work` in the version that suits this processor best.
///
/// Only code that the compiler inlines into `work` gains, so the loops that come here are `inline(always)`.
#[inline]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
        fn newer<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        let is_newer = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("bmi1")
            && std::arch::is_x86_feature_detected!("bmi2")
            && std::arch::is_x86_feature_detected!("lzcnt")
            && std::arch::is_x86_feature_detected!("popcnt");
        if is_newer {
            // SAFETY: the processor has every feature that the function is compiled for.
            return unsafe { newer(work) };
        }
    }
    work()
}
