//! Loops compiled twice: for any processor, and for the wide registers and bit instructions of newer ones.
//!
//! Nothing here changes what is computed: the crate's loops are integer arithmetic, which has one result.
#![allow(unsafe_code)]

/// Run `work` as it is best compiled for this processor.
///
/// Only what the compiler inlines into `work` gains by it, so the loops that come here are `inline(always)`.
#[inline]
pub(crate) fn widest<R>(work: impl FnOnce() -> R) -> R {
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
