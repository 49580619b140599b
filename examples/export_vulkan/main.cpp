// Launches kernels that `tikv export` wrote, on any Vulkan device, without Python.
//
// run.py writes the folder that is named on the command line: launches.txt has the launches of two calls, one behind
// the other, in the order of kernels.json and with its numbers:
//
//   buffer NAME BYTES                 memory of an array; NAME.bin, where it is there, is what it starts with
//   kernel FILE GROUPS BINDING BYTES  a launch: its SPIR-V, its threadgroups, binding and size of the arguments
//   array BINDING NAME                one of its arrays
//   number OFFSET VALUE               32 bits in its arguments
//   save NAME                         when all launches are over: write NAME.out
#include <vulkan/vulkan.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static void check(VkResult result, const char* what) {
    if (result == VK_SUCCESS) return;
    std::fprintf(stderr, "%s: VkResult %d\n", what, result);
    std::exit(1);
}

static std::vector<char> read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Buffer {
    VkBuffer buffer;
    VkDeviceMemory memory;
    VkDeviceSize bytes;
    char* mapped;
};

struct Gpu {
    VkInstance instance;
    VkPhysicalDevice physical;
    VkDevice device;
    VkQueue queue;
    VkCommandPool commands;
    uint32_t memory_type;

    Gpu() {
        VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
        application.apiVersion = VK_API_VERSION_1_2;
        VkInstanceCreateInfo made{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
        made.pApplicationInfo = &application;
        check(vkCreateInstance(&made, nullptr, &instance), "vkCreateInstance");
        uint32_t count = 1;
        if (vkEnumeratePhysicalDevices(instance, &count, &physical) < 0 || !count) {
            std::fprintf(stderr, "no Vulkan device\n");
            std::exit(1);
        }
        // What the kernels' capabilities ask for: Int8, Int16, Int64, Float16.
        VkPhysicalDeviceVulkan12Features more{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
        more.shaderInt8 = more.shaderFloat16 = VK_TRUE;
        VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &more};
        features.features.shaderInt16 = features.features.shaderInt64 = VK_TRUE;
        float priority = 1;
        VkDeviceQueueCreateInfo queues{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
        queues.queueFamilyIndex = family();
        queues.queueCount = 1;
        queues.pQueuePriorities = &priority;
        VkDeviceCreateInfo wanted{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, &features};
        wanted.queueCreateInfoCount = 1;
        wanted.pQueueCreateInfos = &queues;
        check(vkCreateDevice(physical, &wanted, nullptr, &device), "vkCreateDevice");
        vkGetDeviceQueue(device, family(), 0, &queue);
        VkCommandPoolCreateInfo pool{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
        pool.queueFamilyIndex = family();
        check(vkCreateCommandPool(device, &pool, nullptr, &commands), "vkCreateCommandPool");
    }

    uint32_t family() const {
        uint32_t count = 0;
        vkGetPhysicalDeviceQueueFamilyProperties(physical, &count, nullptr);
        std::vector<VkQueueFamilyProperties> found(count);
        vkGetPhysicalDeviceQueueFamilyProperties(physical, &count, found.data());
        for (uint32_t i = 0; i < count; i++)
            if (found[i].queueFlags & VK_QUEUE_COMPUTE_BIT) return i;
        std::fprintf(stderr, "no queue for compute\n");
        std::exit(1);
    }

    // Memory that host and device see, full of zeros.
    Buffer allocate(VkDeviceSize bytes) const {
        Buffer made{};
        made.bytes = (bytes + 7) / 8 * 8;  // kernels move words of up to 8 bytes
        VkBufferCreateInfo info{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
        info.size = made.bytes;
        info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT;
        check(vkCreateBuffer(device, &info, nullptr, &made.buffer), "vkCreateBuffer");
        VkMemoryRequirements needed;
        vkGetBufferMemoryRequirements(device, made.buffer, &needed);
        VkPhysicalDeviceMemoryProperties there;
        vkGetPhysicalDeviceMemoryProperties(physical, &there);
        const VkMemoryPropertyFlags flags = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
        uint32_t type = 0;
        while (type < there.memoryTypeCount && (!(needed.memoryTypeBits >> type & 1) ||
                                                (there.memoryTypes[type].propertyFlags & flags) != flags))
            type++;
        VkMemoryAllocateInfo taken{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, nullptr, needed.size, type};
        check(vkAllocateMemory(device, &taken, nullptr, &made.memory), "vkAllocateMemory");
        check(vkBindBufferMemory(device, made.buffer, made.memory, 0), "vkBindBufferMemory");
        void* mapped;
        check(vkMapMemory(device, made.memory, 0, VK_WHOLE_SIZE, 0, &mapped), "vkMapMemory");
        std::memset(mapped, 0, made.bytes);
        made.mapped = static_cast<char*>(mapped);
        return made;
    }

    // One launch, and wait for it. The arguments are a uniform buffer, arrays are storage buffers.
    void launch(const std::vector<char>& spirv, uint32_t groups, uint32_t arguments,
                const std::map<uint32_t, Buffer>& bound) const {
        const auto type_of = [&](uint32_t binding) {
            return binding == arguments ? VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER : VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        };
        VkShaderModuleCreateInfo code{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
        code.codeSize = spirv.size();
        code.pCode = reinterpret_cast<const uint32_t*>(spirv.data());
        VkShaderModule module;
        check(vkCreateShaderModule(device, &code, nullptr, &module), "vkCreateShaderModule");

        std::vector<VkDescriptorSetLayoutBinding> bindings;
        for (const auto& [binding, buffer] : bound)
            bindings.push_back({binding, type_of(binding), 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr});
        VkDescriptorSetLayoutCreateInfo of_set{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO};
        of_set.bindingCount = uint32_t(bindings.size());
        of_set.pBindings = bindings.data();
        VkDescriptorSetLayout set_layout;
        check(vkCreateDescriptorSetLayout(device, &of_set, nullptr, &set_layout), "vkCreateDescriptorSetLayout");
        VkPipelineLayoutCreateInfo of_pipeline{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
        of_pipeline.setLayoutCount = 1;
        of_pipeline.pSetLayouts = &set_layout;
        VkPipelineLayout layout;
        check(vkCreatePipelineLayout(device, &of_pipeline, nullptr, &layout), "vkCreatePipelineLayout");
        VkComputePipelineCreateInfo wanted{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
        wanted.stage = {VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, nullptr, 0,
                        VK_SHADER_STAGE_COMPUTE_BIT, module, "main", nullptr};
        wanted.layout = layout;
        VkPipeline pipeline;
        check(vkCreateComputePipelines(device, nullptr, 1, &wanted, nullptr, &pipeline), "vkCreateComputePipelines");

        const VkDescriptorPoolSize sizes[] = {{VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER, 1},
                                              {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, uint32_t(bindings.size())}};
        VkDescriptorPoolCreateInfo of_pool{VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO};
        of_pool.maxSets = 1;
        of_pool.poolSizeCount = 2;
        of_pool.pPoolSizes = sizes;
        VkDescriptorPool pool;
        check(vkCreateDescriptorPool(device, &of_pool, nullptr, &pool), "vkCreateDescriptorPool");
        VkDescriptorSetAllocateInfo taken{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO, nullptr, pool, 1, &set_layout};
        VkDescriptorSet set;
        check(vkAllocateDescriptorSets(device, &taken, &set), "vkAllocateDescriptorSets");
        for (const auto& [binding, buffer] : bound) {
            VkDescriptorBufferInfo whole{buffer.buffer, 0, VK_WHOLE_SIZE};
            VkWriteDescriptorSet write{VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET};
            write.dstSet = set;
            write.dstBinding = binding;
            write.descriptorCount = 1;
            write.descriptorType = type_of(binding);
            write.pBufferInfo = &whole;
            vkUpdateDescriptorSets(device, 1, &write, 0, nullptr);
        }

        VkCommandBufferAllocateInfo one{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, nullptr, commands,
                                        VK_COMMAND_BUFFER_LEVEL_PRIMARY, 1};
        VkCommandBuffer command;
        check(vkAllocateCommandBuffers(device, &one, &command), "vkAllocateCommandBuffers");
        VkCommandBufferBeginInfo begin{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
        check(vkBeginCommandBuffer(command, &begin), "vkBeginCommandBuffer");
        vkCmdBindPipeline(command, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
        vkCmdBindDescriptorSets(command, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, nullptr);
        vkCmdDispatch(command, groups, 1, 1);
        check(vkEndCommandBuffer(command), "vkEndCommandBuffer");
        VkSubmitInfo submit{VK_STRUCTURE_TYPE_SUBMIT_INFO};
        submit.commandBufferCount = 1;
        submit.pCommandBuffers = &command;
        check(vkQueueSubmit(queue, 1, &submit, nullptr), "vkQueueSubmit");
        check(vkQueueWaitIdle(queue), "vkQueueWaitIdle");

        vkFreeCommandBuffers(device, commands, 1, &command);
        vkDestroyDescriptorPool(device, pool, nullptr);
        vkDestroyPipeline(device, pipeline, nullptr);
        vkDestroyPipelineLayout(device, layout, nullptr);
        vkDestroyDescriptorSetLayout(device, set_layout, nullptr);
        vkDestroyShaderModule(device, module, nullptr);
    }
};

struct Launch {
    std::string file;
    uint32_t groups = 0, binding = 0;  // of the arguments
    Buffer arguments{};
    std::map<uint32_t, Buffer> bound;
};

int main(int count, char** given) {
    if (count != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", given[0]);
        return 2;
    }
    const std::string folder = std::string(given[1]) + "/";
    Gpu gpu;
    std::map<std::string, Buffer> buffers;
    std::vector<Launch> launches;
    std::vector<std::string> saved;
    std::ifstream lines(folder + "launches.txt");
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string what, name;
        words >> what;
        if (what == "buffer") {
            VkDeviceSize bytes;
            words >> name >> bytes;
            buffers[name] = gpu.allocate(bytes);
            const std::vector<char> start = read(folder + name + ".bin");
            std::memcpy(buffers[name].mapped, start.data(), start.size());
        } else if (what == "kernel") {
            Launch launch;
            VkDeviceSize bytes;
            words >> launch.file >> launch.groups >> launch.binding >> bytes;
            launch.arguments = launch.bound[launch.binding] = gpu.allocate(bytes);
            launches.push_back(launch);
        } else if (what == "array") {
            uint32_t binding;
            words >> binding >> name;
            launches.back().bound[binding] = buffers.at(name);
        } else if (what == "number") {
            size_t offset;
            uint32_t value;
            words >> offset >> value;
            std::memcpy(launches.back().arguments.mapped + offset, &value, sizeof value);
        } else if (what == "save") {
            words >> name;
            saved.push_back(name);
        }
    }
    for (const Launch& launch : launches) gpu.launch(read(folder + launch.file), launch.groups, launch.binding, launch.bound);
    for (const std::string& name : saved)
        std::ofstream(folder + name + ".out", std::ios::binary).write(buffers[name].mapped, buffers[name].bytes);
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(gpu.physical, &properties);
    std::printf("%zu launches on %s\n", launches.size(), properties.deviceName);
    return 0;
}
