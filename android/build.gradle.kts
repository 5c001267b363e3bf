buildscript {
    repositories {
        google()
        mavenCentral()
    }
    dependencies {
        // The Android plugin compiles Kotlin itself, by default with an older Kotlin than the tests here use.
        classpath(libs.kotlin.gradle.plugin)
    }
}

plugins {
    alias(libs.plugins.android.application) apply false
    alias(libs.plugins.android.library) apply false
    alias(libs.plugins.kotlin.serialization) apply false
}
