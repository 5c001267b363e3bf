// Cody and Waite's two-part logarithm of 2 as fdlibm has it: the low 21 bits of the first part are zero, so its product with
// any exponent is exact.
private let log2E = 1.4426950408889634
private let ln2High = 6.93147180369123816490e-01
private let ln2Low = 1.90821492927058770002e-10
/// Below it the result is 0, so no host meets a subnormal number.
private let leastExponent = -700.0
/// 1/n!, each rounded once, from n = 12 down; the first coefficient is 1/13!.
private let firstCoefficient = 1.0 / 6_227_020_800
private let coefficients: [Double] = [
    479_001_600, 39_916_800, 3_628_800, 362_880, 40_320, 5_040, 720, 120, 24, 6, 2, 1, 1,
].map { 1.0 / $0 }

/// Puts e^x into the place of each x <= 0, the same bits on every host; 0 below -700.
///
/// With `k = floor(x * log2(e) + 0.5)` and `r = (x - k * ln2High) - k * ln2Low`, it is the Taylor polynomial of degree 13 in r by
/// Horner's rule, cut off at 5e-18 of the result, times 2^k, which is exact. Only + - * and floor are used, each rounded once:
/// Swift fuses no multiplication with an addition. Within 2 units in the last place of the true value.
public func expNonPositive(_ values: UnsafeMutableBufferPointer<Double>) {
    coefficients.withUnsafeBufferPointer { coefficients in
        for i in values.indices {
            let x = values[i]
            if x < leastExponent {
                values[i] = 0
                continue
            }
            let k = (x * log2E + 0.5).rounded(.down)
            let r = (x - k * ln2High) - k * ln2Low
            var value = firstCoefficient
            for coefficient in coefficients {
                value *= r
                value += coefficient
            }
            values[i] = value * Double(bitPattern: UInt64(Int(k) + 1023) << 52)
        }
    }
}
